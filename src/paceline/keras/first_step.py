"""A run's first step on several ranks, held against the same step of one process.

A fork of the calling process computes the step on the whole batch, with Keras alone. Its gradients, its changes of
variables and its logs must be those of the ranks. If they are not, the model is put back and the plan is refused: the
training step is no sum over samples, in a way that nothing corrected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from paceline.errors import PlanRefused
from paceline.keras.computation import Computation
from paceline.keras.forks import forked
from paceline.keras.state import variables
from paceline.keras.wire import receive, send, tensors_of

ROUNDINGS = 10  # tolerated, in square roots of the dtype's relative step: 0.3 % in float32
_FLOOR = 1e-3  # of the largest value of all: what is smaller is a rounding of nothing

_HINT = ("{kind}_step couples the samples of a batch; it must be a sum or a mean over samples: a loss of Keras, or a "
         "mean of values that each depend on one sample. plan='single' trains anything")


@contextmanager
def checked(computation: Computation, kind: str, batch: Any, *, needed: bool) -> Iterator[Callable[[Any], None]]:
    """What is to be called with the answer of the ranks' step, which is taken inside.

    Raises:
        PlanRefused: one process computes something else. The variables are as they were before.
    """
    if not needed:
        yield lambda answer: None
        return
    before = [(variable, variable._value.detach().clone()) for variable in variables(computation.model)]
    gradients: list[torch.Tensor | None] = []
    computation.gradients.recorder = gradients.extend
    process, connection = _begun(computation, kind, batch)

    def check(answer: Any) -> None:
        differing = _differing(computation.model, kind, gradients, answer, connection)
        if differing:
            with torch.no_grad():
                for variable, value in before:
                    variable._value.copy_(value)
            name = type(computation.model).__name__
            raise PlanRefused(f"the first {kind} step of {name} on several ranks is not what one process computes: "
                              f"{differing}", hint=_HINT.format(kind=kind))

    try:
        yield check
    finally:
        computation.gradients.recorder = None
        connection.close()
        process.kill()
        process.join()


def _begun(computation: Computation, kind: str, batch: Any) -> tuple[Any, Connection]:
    """A fork that computes the step."""
    def compute(connection: Connection) -> None:
        torch.set_num_threads(1)
        gradients: list[torch.Tensor | None] = []
        computation.gradients.recorder = gradients.extend
        answer = computation.step(kind, batch, None)
        send(connection, {"gradients": gradients, "answer": tensors_of(answer),
                          "variables": [variable._value for variable in _compared(computation.model, gradients)]})

    return forked(compute)


def _compared(model: Any, gradients: list[Any]) -> list[Any]:
    """Variables that a step changes by more than a Keras optimizer's update, whose gradients are compared."""
    return list(model.non_trainable_variables if gradients else model.variables)


def _differing(model: Any, kind: str, gradients: list[Any], answer: Any, connection: Connection) -> str:
    """What differs from one process, in words; nothing if nothing does, or if that process came to no end."""
    try:
        expected = receive(connection)
    except (EOFError, OSError):
        print(f"the first {kind} step was not compared with one process: that process failed", file=sys.stderr)
        return ""
    kept = _compared(model, gradients)
    for what, ours, theirs, names in (
            ("the gradient", gradients, expected["gradients"], _paths(model.trainable_variables)),
            ("the variable", [variable._value for variable in kept], expected["variables"], _paths(kept)),
            ("the result", tensors_of(answer), expected["answer"], [])):
        if len(ours) != len(theirs):
            return f"{len(ours)} in place of {len(theirs)} tensors as {what}s"
        largest = max((float(tensor.detach().double().abs().max()) for tensor in theirs
                       if tensor is not None and tensor.numel()), default=0.0)
        for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if not _are_near(mine, other, floor=_FLOOR * largest):
                name = f" of {names[place]}" if place < len(names) else f" {place}"
                return f"{what}{name} is {_shown(mine)} in place of {_shown(other)}"
    return ""


def _paths(kept: Iterable[Any]) -> list[str]:
    return [variable.path for variable in kept]


def _are_near(mine: Any, other: Any, *, floor: float) -> bool:
    if mine is None or other is None:
        return mine is other
    if mine.shape != other.shape:
        return False
    if not mine.numel():
        return True
    # Keras multiplies matrices in float32 even where its variables are float64.
    eps = max(torch.finfo(kind).eps for kind in (mine.dtype, torch.float32)) if mine.is_floating_point() else 0.0
    relative = ROUNDINGS * eps ** 0.5
    mine, other = mine.detach().cpu().double(), other.double()
    scale = max(float(other.abs().max()), floor)
    return bool(((mine - other).abs() <= relative * scale).logical_or(mine.isnan() & other.isnan()).all())


def _shown(tensor: Any) -> str:
    if tensor is None:
        return "nothing"
    values = tensor.detach().double().reshape(-1)
    return f"{float(values[0]):.6g}" if len(values) == 1 else f"a tensor of norm {float(values.norm()):.6g}"
