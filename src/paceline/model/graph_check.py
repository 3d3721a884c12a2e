"""A comparison of a model with its capture, which finds errors of the capture before the first
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.base.logs import logger
from paceline.model.copy_on_write import lazy_copies
from paceline.model.forward_state import state_kept
from paceline.model.graph_limits import ModuleCalls, call, is_near
from paceline.model.randomness import WithoutRandomness
from paceline.torch_private import pytree

if TYPE_CHECKING:
    from paceline.model.graph import Capture

FORWARDS = 2  # forwards in a row: the second one sees the state that the first has left
MAX_BYTES = (
    64 * 1024**2
)  # of parameters: a larger model would need too much memory and time beside its gradients


@dataclass(frozen=True)
class Difference:
    """The first result of a capture that differs from the model's."""

    path: str  # path of the module that differs; "" for the model
    description: str  # what differs


def is_comparable(model: nn.Module) -> bool:
    """Whether the model is small enough to be run with its gradients before every run."""
    return sum(p.nbytes for p in model.parameters()) <= MAX_BYTES


def first_difference(
    model: nn.Module,
    capture: Capture,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    running: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Difference | None:
    """Run the model and its capture on one batch, twice in a row, with random layers off, in the
    model's mode.

    Outputs and buffers of both are compared, and for the first forward also the gradients of a
    fixed mixture of the outputs. The model's state is left as it was.
    """
    calls = [ModuleCalls(model) for _ in range(FORWARDS)]
    expected: list[_Figures] = []
    with state_kept(model) as before, running(), WithoutRandomness():
        try:
            for each in calls:
                with each.watching():
                    forward = partial(call, model, args, kwargs)
                    expected.append(_figures(model, forward, backward=not expected))
        except Exception as error:  # on a batch of this size, say
            logger.info("not compared with its capture: the model fails on the example: %s", error)
            return None
        before.restore()
        for number, figures in enumerate(expected):
            made: dict[str, torch.Tensor] = {}
            try:
                actual = _figures(
                    model, partial(_run, model, capture, args, kwargs, made), backward=not number
                )
            except Exception as error:
                return Difference("", f"{type(error).__name__}: {error}")
            difference = _compare(figures, actual)
            if difference is not None and not difference.path and difference.description == OUTPUT:
                return replace(difference, path=_first_other(capture, made, calls[number]))
            if difference is not None:
                return difference
    return None


OUTPUT = "its output differs"


@dataclass(frozen=True)
class _Figures:
    """The results of one forward."""

    outputs: list[torch.Tensor]  # flat, without gradient
    gradients: dict[str, torch.Tensor | None]  # by name; empty if there was no backward
    buffers: dict[str, torch.Tensor]  # by name, after the forward


def _figures(model: nn.Module, forward: Callable[[], Any], *, backward: bool) -> _Figures:
    outputs = pytree.tensor_leaves(forward())
    gradients: dict[str, torch.Tensor | None] = {}
    parts = [_mixture(output) for output in outputs if output.requires_grad] if backward else []
    if parts:
        with _without_gradients(
            model
        ) as trained:  # a whole backward: torch's reentrant checkpoint takes no other
            torch.stack(parts).sum().backward()
            gradients = {
                name: p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad
                for name, p in trained.items()
            }
    return _Figures(
        [output.detach() for output in outputs],
        gradients,
        {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
    )


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Remove the gradients of trained parameters for the block, and yield these parameters by
    name.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.grad for name, p in trained.items()}
    for p in trained.values():
        p.grad = None
    try:
        yield trained
    finally:
        for name, p in trained.items():
            p.grad = before[name]


def _mixture(output: torch.Tensor) -> torch.Tensor:
    """Return a float64 number that depends on every element of an output."""
    flat = torch.view_as_real(output).flatten() if output.is_complex() else output.flatten()
    return (
        flat.double() * torch.linspace(-1, 1, flat.numel(), dtype=torch.float64, device=flat.device)
    ).sum()


def _run(
    model: nn.Module,
    capture: Capture,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: dict[str, torch.Tensor],
) -> Any:
    """Run all pieces one after the other and return the output.

    Args:
        made: It is filled with the values of the pieces, by name.
    """
    parameters = dict(model.named_parameters())
    values = capture.bind(*lazy_copies((args, kwargs)))
    for piece in capture.pieces:
        buffers = dict(model.named_buffers(remove_duplicate=False))
        outputs = piece.run(
            *(parameters[name] for name in piece.parameters),
            *(buffers[name] for name in piece.buffers),
            *(values[name] for name in piece.inputs),
        )
        values |= zip(piece.outputs, outputs, strict=True)
        made |= {name: value.detach() for name, value in zip(piece.outputs, outputs, strict=True)}
    return capture.result(values)


def _compare(expected: _Figures, actual: _Figures) -> Difference | None:
    if len(expected.outputs) != len(actual.outputs):
        return Difference("", OUTPUT)
    if not all(map(is_near, actual.outputs, expected.outputs)):
        return Difference("", OUTPUT)
    for name, buffer in expected.buffers.items():
        if name not in actual.buffers or not is_near(actual.buffers[name], buffer):
            return Difference(name.rpartition(".")[0], f"its buffer '{name}' differs")
    greatest = max(
        (float(g.abs().max()) for g in expected.gradients.values() if g is not None and g.numel()),
        default=0.0,
    )
    for name, gradient in expected.gradients.items():
        other = actual.gradients[name]
        if gradient is None or other is None:  # none at all may come as zeros
            same = not any(bool(tensor.any()) for tensor in (gradient, other) if tensor is not None)
        else:  # one that is zero in exact arithmetic (of an attention key's bias) is noise of the others' size
            same = is_near(other, gradient, size=1e-3 * greatest)
        if not same:
            return Difference("", f"the gradient of '{name}' differs")
    return None


def _first_other(capture: Capture, made: Mapping[str, torch.Tensor], calls: ModuleCalls) -> str:
    """Return the path of the first piece with a result that no module in its place has returned; ""
    if none has.
    """
    for piece in capture.pieces:
        inside = calls.inside(piece.path) if piece.path else []
        for name in piece.outputs if inside else ():
            if name in made and not any(is_near(made[name], tensor) for tensor in inside):
                return piece.path
    return ""
