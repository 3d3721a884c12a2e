"""State that changes where nothing should write to it: what finds memory that flips a bit.

Between an update and the next one nothing writes to the weights and the optimizer's state. So a rank notes fingerprints
of its own after an update, and compares them before the next update and before a checkpoint. No other rank needs to
hold the same, and the rank that finds a difference is the one whose memory changed. Where servers keep the state, they
do so, and workers compare weights after a backward with those that had come before the forward.

Buffers that forwards write to are compared before the next forward, and others with the weights.

torch counts the writes to each tensor. What it has seen written to, by a hook or a callback, is no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.base.errors import DriftError
from paceline.strategies.mesh import Mesh, local_part
from paceline.training.parts.drift import fingerprint
from paceline.training.state import StateOwner


@dataclass(frozen=True, slots=True)
class _Noted:
    """A tensor as it was after an update. writes: that torch had counted."""

    name: str
    tensor: torch.Tensor
    writes: int


class StateAtRest:
    """Fingerprints of tensors of a rank's state after an update.

    What changes unseen after those of a launch's first step is what its code writes to, such as a forward through
    `.data`: it is left out from then on.

    every: steps from one after which they are taken to the next. step: after which they were taken last; None if they
        were let go since.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        every: int,
        *,
        runs_code: bool = True,
    ) -> None:
        """
        Args:
            tensors: This rank's own ones, by what they are in a message.
            runs_code: Whether the job's code runs before they are compared.
        """
        self.tensors, self.every = tensors, every
        self.step: int | None = None
        self._first_step = None if runs_code else 0
        self._written: set[str] = set()
        self._noted: list[_Noted] = []
        self._prints = torch.empty(0, dtype=torch.int64)

    def is_due(self, step: int) -> bool:
        """Whether fingerprints are taken after this step, counted from 1."""
        return self._first_step in (None, step) or step % self.every == 0

    def note(self, step: int) -> None:
        """An update of this step was made."""
        if self.is_due(step):
            self._first_step = step if self._first_step is None else self._first_step
            self._noted = [
                _Noted(name, tensor, tensor._version)
                for name, tensor in self.tensors()
                if name not in self._written
            ]
            self._prints, self.step = _prints(self._noted), step

    def changed(self) -> list[str]:
        """What changed unseen since, by name, if there is something to compare that is to stay."""
        if self.step is None:
            return []
        differs = (_prints(self._noted) != self._prints).nonzero().flatten().tolist()
        changed = [
            each.name
            for each in map(self._noted.__getitem__, differs)
            if each.tensor._version == each.writes
        ]
        if self.step == self._first_step:
            self._written |= set(changed)
            return []
        return changed

    def check(self, mesh: Mesh, device: torch.device) -> None:
        """Compare, if there is something to compare. Collective over all ranks.

        Raises:
            DriftError: on all ranks; that of a rank whose memory changed is the one that counts.
        """
        if self.step is None:
            return
        changed = self.changed()
        flags = torch.zeros(mesh.world_size, dtype=torch.int64, device=device)
        flags[mesh.rank] = len(changed)
        if mesh.world_size > 1:
            dist.all_reduce(flags)
        if ranks := flags.nonzero().flatten().tolist():
            error = self.error(ranks, changed)
            error.heard = mesh.rank not in ranks  # type: ignore[attr-defined]
            raise error

    def forget(self) -> None:
        """An update follows: the tensors are let go."""
        self._noted, self.step = [], None

    def error(
        self, ranks: Sequence[int], changed: Sequence[str], after: str = "the update of"
    ) -> DriftError:
        """ranks: whose memory changed. changed: what of this one's. after: what of the step, in words."""
        names = (
            f"{changed[0]} and {len(changed) - 1} more"
            if len(changed) > 1
            else "".join(changed) or "its state"
        )
        return DriftError(
            f"on {' and '.join(f'rank {rank}' for rank in ranks)}, {names} changed after {after} step "
            f"{self.step}, and nothing was seen to write to it; no update was made with it",
            hint="faulty memory; or code of yours that writes through .data or NumPy between two updates, but not "
            "between the first two. No checkpoint has it: --resume goes on from the newest one",
        )


def of_updates(
    owner: StateOwner, edited: Collection[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """What only updates write to, and buffers. Statistics of normalisations are left out, which a layer that was frozen
    before may begin to write.

    edited: names of weights that forwards were seen to write to.
    """
    for name, p in owner.local_parameters.items():
        if name not in edited:
            yield from _memory(f"'{name}'", p.detach())
    for name in owner.optimizer_state.local_parameters():
        for key, value in owner.optimizer_state.by_parameter(name):
            if isinstance(value, torch.Tensor):
                yield from _memory(f"the optimizer's {key} of '{name}'", value)
    statistics = {
        buffer
        for module in owner.model.modules()
        if isinstance(module, _NormBase)
        for buffer in module.buffers(recurse=False)
    }
    for name, buffer in owner.model.named_buffers():
        if buffer not in statistics:
            yield from _memory(f"the buffer '{name}'", buffer)


def buffers_of(owner: StateOwner) -> Iterator[tuple[str, torch.Tensor]]:
    """What nothing writes to between a step's end and the next forward."""
    for name, buffer in owner.model.named_buffers():
        yield from _memory(f"the buffer '{name}'", buffer)


def _memory(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors of this rank that a tensor consists of: a quantized one has several."""
    tensor = local_part(tensor)
    if is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _memory(f"{part} of {name}", getattr(tensor, part))
    elif (
        tensor.layout == torch.strided
        and tensor.numel()
        and not (tensor.is_meta or tensor.is_inference())
    ):
        yield name, tensor


def _prints(noted: list[_Noted]) -> torch.Tensor:
    """On the CPU: the one time that the host waits for the device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    prints = [fingerprint(each.tensor) for each in noted]
    for each in prints:
        by_device.setdefault(each.device, []).append(each)
    values = {device: iter(torch.stack(each).tolist()) for device, each in by_device.items()}
    return torch.tensor([next(values[each.device]) for each in prints], dtype=torch.int64)
