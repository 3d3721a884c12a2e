"""Recomputation: backward computes each block again from its input, or only the block's
attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from paceline.base.errors import PlanRefused
from paceline.model.attention import Selective
from paceline.model.forward_effects import NOTHING, ForwardEffects
from paceline.model.forward_state import ForwardState
from paceline.model.units import find_units, refuse_scripted
from paceline.torch_private import pytree

if TYPE_CHECKING:
    from torch import nn

    from paceline.strategies.plan import Plan


def prepare(model: nn.Module, *, plan: Plan, observed: ForwardEffects = NOTHING, **_: Any) -> None:
    """Wrap the forward of every unit. The names of modules and parameters stay the same.

    recompute=selective watches a unit's operators; see `attention.py`. Under recompute=full, a
    model without units is recomputed whole. The second forward reads the same state and draws the
    same random numbers as the first one. Its writes to buffers, attributes and parameters are
    dropped.
    """
    if plan.modifiers.recompute == "selective":
        for unit in list(find_units(model).values()) or [model]:
            unit.forward = _Watched(unit.forward)
        return
    _refuse_unseen_state(model, observed.unseen_state)
    refuse_scripted(model, "recompute=full")
    # FSDP2 gives a unit new parameters in each forward, except for those that a forward edits,
    # which it does not shard.
    whole = {
        p for name, p in model.named_parameters() if name in observed.edited or plan.axes.shard == 1
    }
    for unit in list(find_units(model).values()) or [model]:
        # Skip a piece of the user's own code, whose result may depend on how often it runs.
        if getattr(unit, "runs_once", False):
            continue
        unit.forward = _Recomputed(unit.forward, ForwardState(unit, edited=whole))


def _refuse_unseen_state(model: nn.Module, path: str | None) -> None:
    """Refuse to recompute a module with unseen state.

    Args:
        path: See `ForwardEffects.unseen_state`.

    Raises:
        PlanRefused: the module is recomputed.
    """
    if path is not None and any(
        not unit or path == unit or path.startswith(f"{unit}.")
        for unit in find_units(model) or [""]
    ):
        raise PlanRefused(
            f"'{path}' gives another output each time for the same input, by a state that none of its "
            "attributes shows, and recompute=full would change it twice a step",
            hint="leave out recompute=full, or keep the state in a buffer, or in an attribute that is a "
            "number, a tensor, or a list or dict of these",
        )


class _Watched:
    """A forward whose attention is recomputed in backward."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        with Selective():
            return self.forward(*args, **kwargs)


class _Recomputed:
    """A forward that runs again in backward."""

    def __init__(self, forward: Callable[..., Any], state: ForwardState) -> None:
        self.forward, self.state = forward, state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        inputs: dict[str, Any] = {"args": args, "kwargs": kwargs}
        moment = self.state.now(inputs)
        devices = {leaf.device for leaf in pytree.tensor_leaves(inputs)}
        # torch looks for devices in these arguments, and raises an error in backward if one was
        # written to. It therefore gets tensors that nothing writes to.
        return checkpoint(
            lambda *_: self.forward(*inputs["args"], **inputs["kwargs"]),
            *(torch.empty(0, device=device) for device in devices),
            use_reentrant=False,
            # `again` restores the streams of the CPU.
            preserve_rng_state=any(device.type != "cpu" for device in devices),
            context_fn=lambda: (nullcontext(), moment.again()),
        )
