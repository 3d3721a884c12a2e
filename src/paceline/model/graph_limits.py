"""The effects of a model's forward that a recorded graph would lose, found by running the model
before it is recorded.

A module with such effects is taken whole: its own code runs on one rank, which has its attributes.
If the model's own forward has such effects, the plan is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import nn

from paceline.base.errors import PlanRefused
from paceline.base.streams import stream_states
from paceline.model.attributes import is_like_a_buffer
from paceline.model.copy_on_write import lazy_copies
from paceline.model.forward_state import ForwardSnapshot, ForwardState, state_kept
from paceline.model.randomness import WithoutRandomness
from paceline.torch_private.dispatch import OperatorMode
from paceline.torch_private.modules import BACKWARD_HOOKS, has_global_backward_hooks, has_hooks
from paceline.torch_private.pytree import tensor_leaves, tree_leaves, tree_map_only

WHOLE_MODEL_PLANS = "data=N and shard=N plans run the model as it is"


@dataclass
class Findings:
    """The findings of `examine`."""

    opaque: dict[str, str] = field(default_factory=dict)  # reasons to take modules whole, by path
    changing: set[str] = field(default_factory=set)  # names of buffers that a forward changes


def examine(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Findings:
    """Run a model twice in its mode, on the same batch and with random layers off, and find the
    state of its modules.

    The model's state is left as it was, with one exception: tensors that its own forward puts in
    place of plain attributes become buffers, which a graph can hold.

    Raises:
        PlanRefused: the model's own forward has effects that no graph can hold.
    """
    findings = Findings(_with_hooks(model))
    with state_kept(model) as before, running(), WithoutRandomness(), _WithoutMessages():
        to_buffers = _run_twice(model, args, kwargs, before, findings)
    for attribute in to_buffers:
        model.register_buffer(attribute, vars(model).pop(attribute), persistent=False)
    for path, why in findings.opaque.items():
        if not path:
            raise PlanRefused(
                f"{type(model).__name__} itself {why}, and a rank that runs a part of the "
                "model would lose that",
                hint=f"{WHOLE_MODEL_PLANS}; a module of the model that does "
                "this, and is called itself, can be kept",
            )
    return findings


class _WithoutMessages(OperatorMode):
    """A mode that refuses a forward that sends messages: ranks that run other parts of it would
    wait for each other.
    """

    def run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        if "c10d" in func.namespace:
            raise PlanRefused(
                f"the model calls torch.distributed itself ({func.overloadpacket.__name__}), and ranks "
                "of a plan that splits it run other parts",
                hint=WHOLE_MODEL_PLANS,
            )
        return func(*args, **kwargs)


def _with_hooks(model: nn.Module) -> dict[str, str]:
    """Return the modules whose backward hooks would be lost: the reason by path."""
    if has_global_backward_hooks():
        return {"": "has backward hooks on every module"}
    return {
        path: "has a backward hook"
        for path, module in model.named_modules()
        if has_hooks(module, BACKWARD_HOOKS)
    }


def _run_twice(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    before: ForwardSnapshot,
    findings: Findings,
) -> list[str]:
    """Note the findings, and return the names of the model's own attributes that are to be
    buffers.
    """
    first, output = _watched(model, args, kwargs)
    _make_known((args, kwargs, output))
    for path in first.draws:
        findings.opaque.setdefault(path, "draws from Python's or NumPy's random numbers")
    findings.changing.update(before.tensors.changed())
    attributes = ForwardState(model).now().attributes
    before.restore(with_attributes=False)
    again, repeated = _watched(model, args, kwargs)
    values, to_buffers = before.attributes.values(), []
    changing = attributes.changed()
    for name in changing:
        path, _, attribute = name.rpartition(".")
        if not path and is_like_a_buffer(values.get(name), getattr(model, name)):
            to_buffers.append(name)
            findings.changing.add(name)
        else:
            findings.opaque.setdefault(path, f"changes its attribute '{attribute}' each time")
    if changing or not alike(output, repeated):
        before.restore()  # what else there is shows where all begins as it did
        again, repeated = _watched(model, args, kwargs)
    if not alike(output, repeated):
        findings.opaque.setdefault(
            first.first_unlike(again) or "",
            "gives another output each time that it is called with the same input",
        )
    return to_buffers


def module_with_unseen_state(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> str | None:
    """Return the path of the first module with state that the model does not show; None if there is
    none.

    Such a module gives another output for the same input although all visible state was put back.
    Its state may be a count in an object of the user's own, in a closure or in a global. The model
    runs twice in its mode, with random layers off. Its visible state is left as it was.
    """
    with state_kept(model) as before, running(), WithoutRandomness():
        first, _ = _watched(model, args, kwargs)
        before.restore()
        again, _ = _watched(model, args, kwargs)
    return first.first_unlike(again)


def _watched(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ModuleCalls, Any]:
    """Run the model, and return the calls of its modules and its output."""
    calls = ModuleCalls(model)
    with calls.watching():
        return calls, call(model, args, kwargs)


def call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the model's output for copies of these arguments, to which it may write."""
    args, kwargs = lazy_copies((args, kwargs))
    return model(*args, **kwargs)


def _make_known(value: Any) -> None:
    """Let torch see the fields of dataclasses; otherwise a recording takes each dataclass for one
    value.
    """
    for leaf in tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(type(leaf))
            _make_known(leaf)  # what its fields hold


def alike(value: Any, other: Any) -> bool:
    """Whether two outputs of the same calculation on the same numbers are equal except for
    rounding.
    """
    tensors, others = tensor_leaves(value), tensor_leaves(other)
    return len(tensors) == len(others) and all(map(is_near, tensors, others))


# The allowed difference of results of the same operators in another order, relative to the greatest
# element.
ALLOWED = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
    torch.bfloat16: 0.1,
    torch.float16: 0.02,
}


def is_near(tensor: torch.Tensor, other: torch.Tensor, *, size: float = 0.0) -> bool:
    """Whether two tensors are equal except for rounding.

    Args:
        size: The size of the values of which they are a part, if they may be noise beside those.
    """
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    tensor, other = tensor.detach(), other.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return bool(torch.equal(tensor, other))
    if not tensor.numel() or torch.equal(tensor, other):
        return True
    both = tensor.isnan() & other.isnan() | (tensor == other)
    differences = torch.where(both, 0.0, (tensor - other).abs().double())
    greatest = max(float(other.abs().nan_to_num(0.0, 0.0, 0.0).max()), size)
    return float(differences.max()) <= ALLOWED.get(tensor.dtype, 1e-3) * greatest


class ModuleCalls:
    """A record of the modules that draw from Python's and NumPy's generators, and of what each call
    of a module returns.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.draws: list[str] = []  # paths of the modules whose own code draws
        self.outputs: list[tuple[str, Any]] = []  # of each call in order, detached
        self._inside: list[str] = []
        self._state = stream_states()[:2]

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for path, module in self.model.named_modules():
            handles += [
                module.register_forward_pre_hook(
                    lambda module, inputs, path=path: self._enter(path)
                ),
                module.register_forward_hook(
                    lambda module, inputs, output, path=path: self._leave(path, output)
                ),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def first_unlike(self, other: ModuleCalls) -> str | None:
        """Return the path of the first module that has returned something else in the same call of
        another forward; None if there is none.
        """
        return next(
            (
                path
                for (path, a), (_, b) in zip(self.outputs, other.outputs, strict=False)
                if not alike(a, b)
            ),
            None,
        )

    def inside(self, path: str) -> list[torch.Tensor]:
        """Return the tensors that a module and those inside it have returned, if it was called."""
        inside = [each for each in self.outputs if f"{each[0]}.".startswith(f"{path}.")]
        return tensor_leaves(inside) if any(name == path for name, _ in inside) else []

    def _enter(self, path: str) -> None:
        self._look()
        self._inside.append(path)

    def _leave(self, path: str, output: Any) -> None:
        self._look()
        self._inside.pop()
        values = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), output)
        self.outputs.append((path, values))

    def _look(self) -> None:
        state = stream_states()[:2]
        if state != self._state:
            self._state = state
            self.draws.append(self._inside[-1] if self._inside else "")
