"""Modules whose inside can't be recorded, because its course depends on values: taken as one operator each.

While the model is captured such a module gives stand-ins of the right shapes; where the captured graph runs, the module
itself runs, whole, in one piece. Its shapes are learned from running the model on two and on three samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

OPAQUE = "paceline::opaque"
_CALLS: list[Call] = []  # of the capture that is being made; the operator's number is an index


@dataclass(frozen=True)
class Shape:
    """An output's shape as it grows with the samples of a batch: by so much a sample along each dim."""

    fixed: tuple[int, ...]
    per_sample: tuple[int, ...]
    dtype: torch.dtype

    def at(self, samples: int) -> tuple[int, ...]:
        return tuple(a + b * samples for a, b in zip(self.fixed, self.per_sample, strict=True))

    @classmethod
    def through(cls, two: torch.Tensor, three: torch.Tensor) -> Shape:
        """From the outputs for two and for three samples."""
        each = tuple(b - a for a, b in zip(two.shape, three.shape, strict=True))
        return cls(tuple(a - 2 * b for a, b in zip(two.shape, each, strict=True)), each, two.dtype)


@dataclass(frozen=True)
class Outputs:
    """What a module returns: its structure, and the shapes of the tensors in it."""

    spec: pytree.TreeSpec
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Call:
    """One call of an opaque module in a capture. constants: arguments that are no tensors, by position."""

    path: str
    module: nn.Module
    in_spec: pytree.TreeSpec
    constants: Mapping[int, Any]
    outputs: Outputs
    samples: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]

    def run(self, held: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The module itself, with these parameters and buffers of its own."""
        given, count = iter(inputs), len(inputs) + len(self.constants)
        flat = [self.constants[i] if i in self.constants else next(given) for i in range(count)]
        args, kwargs = pytree.tree_unflatten(flat, self.in_spec)
        names = [name.removeprefix(f"{self.path}.") for name in (*self.parameters, *self.buffers)]
        found = functional_call(self.module, dict(zip(names, held, strict=True)), args, kwargs, tie_weights=False)
        return tuple(leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor))


@torch.library.custom_op(OPAQUE, mutates_args=())
def _opaque(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    raise AssertionError("stands for a module in a capture and is never run")


@_opaque.register_fake
def _(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    call = _CALLS[number]
    return [inputs[0].new_empty(shape.at(call.samples), dtype=shape.dtype) for shape in call.outputs.shapes]


def _gradient(context: Any, *gradients: torch.Tensor) -> Any:
    raise AssertionError("a capture has no backward")


_opaque.register_autograd(_gradient)


@dataclass
class OpaqueModules:
    """The modules of a model that are taken whole, and what they return. Grows as captures fail."""

    outputs: dict[str, list[Outputs]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.outputs)

    def learn(self, model: nn.Module, paths: Sequence[str], run: Callable[[int], Any]) -> None:
        """Add modules: run the model on two and on three samples and see what they return, call by call."""
        seen: dict[int, dict[str, list[Any]]] = {2: {}, 3: {}}
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for samples, found in seen.items():
            handles = [model.get_submodule(path).register_forward_hook(
                lambda module, args, output, path=path, found=found: found.setdefault(path, []).append(
                    pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output))) for path in paths]
            with torch.no_grad():
                run(samples)
            for handle in handles:
                handle.remove()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        for path in seen[2]:
            self.outputs[path] = [_outputs(two, three) for two, three in zip(seen[2][path], seen[3][path], strict=True)]

    @contextmanager
    def standing_in(self, model: nn.Module, samples: int) -> Iterator[list[Call]]:
        """While a model is captured, each of these modules gives stand-ins. Yields their calls."""
        _CALLS.clear()
        modules = {path: model.get_submodule(path) for path in self.outputs}
        for path, module in modules.items():
            module.forward = self._stand_in(path, module, samples)
        try:
            yield _CALLS
        finally:
            for module in modules.values():
                del module.forward  # the class's own is there again

    def _stand_in(self, path: str, module: nn.Module, samples: int) -> Callable[..., Any]:
        count = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            flat, spec = pytree.tree_flatten((args, kwargs))
            tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
            constants = {i: leaf for i, leaf in enumerate(flat) if not isinstance(leaf, torch.Tensor)}
            returned = self.outputs[path][count % len(self.outputs[path])]
            count += 1
            prefix = f"{path}."
            _CALLS.append(Call(path, module, spec, constants, returned, samples,
                               tuple(prefix + name for name, _ in module.named_parameters()),
                               tuple(prefix + name for name, _ in module.named_buffers())))
            made = iter(_opaque(tensors, len(_CALLS) - 1))
            return pytree.tree_unflatten(list(made), returned.spec)

        return forward


def _outputs(two: Any, three: Any) -> Outputs:
    flat, spec = pytree.tree_flatten(two)
    if not all(isinstance(leaf, torch.Tensor) for leaf in flat):
        raise TypeError("an opaque module returns something that is no tensor")
    return Outputs(spec, tuple(Shape.through(a, b) for a, b in zip(flat, pytree.tree_leaves(three), strict=True)))


def modules_in(traceback: TracebackType | None, model: nn.Module) -> list[str]:
    """Paths of the modules whose methods an error came through, outermost first."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: list[str] = []
    while traceback is not None:
        path = paths.get(id(traceback.tb_frame.f_locals.get("self")))
        if path and (not found or found[-1] != path):
            found.append(path)
        traceback = traceback.tb_next
    return found
