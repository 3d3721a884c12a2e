"""Full recomputation: each block keeps only its input and is computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from paceline.capture.forward_state import ForwardState
from paceline.capture.probe import NOTHING, Observed
from paceline.errors import PlanRefused
from paceline.strategies.units import find_units, refuse_scripted

if TYPE_CHECKING:
    from torch import nn

    from paceline.plans import Plan
    from paceline.strategies.mesh import Mesh


IMPORTS: tuple[str, ...] = ()


def is_active(plan: Plan) -> bool:
    return plan.modifiers.recompute == "full"


def prepare(model: nn.Module, *, plan: Plan, mesh: Mesh, observed: Observed = NOTHING,
            device: torch.device | None = None) -> None:
    """Wrap the forward of every unit, so that the names of modules and parameters stay as they are.

    A model without units is recomputed whole. The second forward reads the state and draws the random numbers that the
    first one did, and what it writes to buffers, attributes and parameters is dropped.
    """
    refuse_scripted(model, "recompute=full")
    buffers: MutableMapping[str, torch.Tensor] | None = getattr(model, "buffers_", None)
    # FSDP2 gives a unit other parameters in each forward; those that a forward edits are no business of its.
    whole = {p for name, p in model.named_parameters() if name in observed.edited or plan.axes.shard == 1}
    for unit in list(find_units(model).values()) or [model]:
        if getattr(unit, "runs_once", False):  # a piece of the user's own code, which may count how often it runs
            continue
        state = ForwardState(unit, buffers=buffers, edited=whole.__contains__)
        unit.forward = _Recomputed(unit.forward, state)


def refuse_unseen_state(model: nn.Module, path: str) -> None:
    """
    Args:
        path: Of a module with a state that the model doesn't show; see `module_with_unseen_state`.

    Raises:
        PlanRefused: it is recomputed.
    """
    if any(not unit or path == unit or path.startswith(f"{unit}.") for unit in find_units(model) or [""]):
        raise PlanRefused(f"'{path}' gives another output each time for the same input, by a state that none of its "
                          "attributes shows, and recompute=full would change it twice a step",
                          hint="leave out recompute=full, or keep the state in a buffer, or in an attribute that is a "
                               "number, a tensor, or a list or dict of these")


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Stands for a buffer among a forward's arguments: its value when it is read."""

    name: str


class _Recomputed:
    """A forward that is run again in backward."""

    def __init__(self, forward: Callable[..., Any], state: ForwardState) -> None:
        self.forward, self.state = forward, state
        self.buffers = {id(buffer): _Buffer(name) for name, buffer in (state.buffers or {}).items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # An argument is kept for backward, and torch refuses it there if it was written to.
        args = tuple(self.buffers.get(id(argument), argument) for argument in args)
        names = tuple(argument.name for argument in args if isinstance(argument, _Buffer))
        return checkpoint(self._run, *args, use_reentrant=False, context_fn=partial(self._contexts, names), **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*(self.state.buffers[argument.name]  # type: ignore[index]
                              if isinstance(argument, _Buffer) else argument for argument in args), **kwargs)

    def _contexts(self, buffers: tuple[str, ...]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self.state.now(buffers=buffers).again()
