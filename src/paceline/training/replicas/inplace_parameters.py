"""Merges edits of parameters that forwards make in place: the norm limit of an embedding, a target
that follows another layer.

On one device a forward sees the whole batch, on a replica a part of it. Before the update, the
replicas therefore merge their edits, element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from paceline.base.errors import PlanRefused, TrainingError
from paceline.launch.collectives.values import names_of_all
from paceline.model.copy_on_write import TensorSnapshot
from paceline.strategies.mesh import local_part
from paceline.torch_private.autograd import accumulated_hooks, version_of
from paceline.torch_private.storage import address

_ROUNDING = (
    16  # units in the last place by which equal edits may differ: devices may add in another order
)


class EditsDifferError(PlanRefused):
    """Raised if replicas have changed a parameter in different ways in the first step. Nothing is
    merged yet.
    """


class Edits:
    """Records this rank's parameters before the forwards of a step, and merges the forwards' edits.

    The first step detects every write to a parameter. Later steps detect new edits by version
    counters for parameters that no forward has changed before. These counters don't count writes
    through `parameter.data`.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        # Keep only this rank's part of a split parameter, because comparing distributed tensors
        # would be a collective.
        self._parameters = {
            name: local_part(p.detach()) if hasattr(p, "to_local") else p
            for name, p in parameters.items()
        }
        self._seen: dict[str, TensorSnapshot] = {}
        self._versions: list[tuple[int, int]] = []
        self._changed: list[str] = []
        self._is_first = True
        # Parameters that a forward has changed in some step, on any replica.
        self.names: list[str] = []

    def begin(self) -> None:
        """Record the parameters before the forwards of a step."""
        looked_at = self._parameters if self._is_first else self.names
        self._seen = {
            name: TensorSnapshot(self._parameters[name])
            for name in looked_at
            if name in self._parameters
        }
        self._versions = self._versions_now()

    def end(self) -> tuple[bool, bool]:
        """Find the edits after the forwards of a step.

        Returns whether the forwards changed a parameter here, and whether they changed one that is
        not known yet.
        """
        self._changed = [name for name, seen in self._seen.items() if seen.is_changed()]
        if not self._is_first:
            versions = zip(self._parameters, self._versions, self._versions_now(), strict=True)
            self._changed += [
                name for name, before, now in versions if before != now and name not in self._seen
            ]
        kept = {*self.names, *self._changed}  # an update would copy every value that is still kept
        self._seen = {name: seen for name, seen in self._seen.items() if name in kept}
        self._is_first = False
        return bool(self._changed), any(name not in self.names for name in self._changed)

    @torch.no_grad()
    def merge(self, group: dist.ProcessGroup, *, has_unknown: bool, step: int) -> None:
        """Give every replica the edits of all of them. Collective over the replicas, a group.

        Args:
            has_unknown: Whether some rank has changed a parameter that is not known yet.

        Raises:
            EditsDifferError: replicas changed an element in different ways in the first step.
            TrainingError: they did so in a later step.
        """
        changed = names_of_all(self._changed, group) if has_unknown else ()
        unknown = [name for name in changed if name not in self.names]
        merged = []
        for name in [*self.names, *unknown]:
            if name in self._parameters:
                tensor = local_part(self._parameters[name].detach())
                before = (
                    local_part(self._seen[name].value)
                    if name in self._seen
                    else (None if name in self._changed else tensor)
                )
                merged.append(
                    (tensor, _merged(name, tensor, before, group, agree=name in unknown, step=step))
                )
        for tensor, value in merged:
            tensor.copy_(value)
        self.names += unknown
        self._seen = {}

    def put_back(self) -> None:
        """Undo the edits of the first step's forwards, and treat the next forwards as the first
        ones.
        """
        for seen in self._seen.values():
            seen.restore()
        self._is_first = True

    def _versions_now(self) -> list[tuple[int, int]]:
        parameters = self._parameters.values()
        return list(zip(map(version_of, parameters), map(address, parameters), strict=True))


def refuse_updates_in_backward(model: torch.nn.Module) -> None:
    """Let no hook on an accumulated gradient write to its parameter if a backward sees only a part
    of the batch.
    """
    for name, parameter in model.named_parameters():
        hooks = accumulated_hooks(parameter)
        for number, hook in list(hooks.items()):
            hooks[number] = partial(_refuse_update, name, hook)


def _refuse_update(
    name: str, hook: Callable[[torch.Tensor], None], parameter: torch.Tensor
) -> None:
    version = version_of(parameter)
    hook(parameter)
    if version_of(parameter) != version:
        raise PlanRefused(
            f"a hook on '{name}' (register_post_accumulate_grad_hook) updates it in backward, by the "
            "gradient of a part of the batch",
            hint="let the job's optimizer update it, or use a plan that doesn't cut the batch, such as "
            "single",
        )


def _merged(
    name: str,
    tensor: torch.Tensor,
    before: torch.Tensor | None,
    group: dist.ProcessGroup,
    *,
    agree: bool,
    step: int,
) -> torch.Tensor:
    """Return a parameter with the edits of all replicas.

    Args:
        before: Its value before the forwards; None if it is not known here.
        agree: Whether some replica may not know that value.
    """
    real = _as_reals(tensor)
    nothing = torch.full_like(real, -torch.inf)
    start = nothing if before is None else _as_reals(before)
    if agree:
        start = start.clone()
        dist.all_reduce(start, dist.ReduceOp.MAX, group=group)
    is_edited = real != start
    ends = torch.stack(
        [torch.where(is_edited, real, nothing), torch.where(is_edited, -real, nothing)]
    )
    ends = torch.where(ends.isnan(), torch.inf, ends)  # a maximum of several could lose a NaN
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    most, least = ends[0], -ends[1]
    is_edited_somewhere = most > -torch.inf
    spread = torch.where(is_edited_somewhere, most - least, 0)
    if bool((spread > _ROUNDING * torch.finfo(real.dtype).eps * most.abs()).any()):
        error = TrainingError if step else EditsDifferError
        raise error(
            f"a forward changes the parameter '{name}' in place, and replicas change it in different ways: "
            "what it becomes depends on the samples",
            hint="register it as a buffer, which becomes the mean of all replicas, or use a plan that doesn't "
            "cut the batch: single, tensor=N, or pipeline=N microbatches=1",
        )
    merged = torch.where(is_edited_somewhere, most, start)
    return torch.view_as_complex(merged) if tensor.is_complex() else merged


def _as_reals(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.is_floating_point() else tensor.double()
