"""Opaque calls: modules and autograd functions that export can't record or would change become one
operator each.

While the model is captured, such a call returns stand-ins of the right shapes. When the captured
graph runs, the module or the function itself runs whole, in one piece. Paceline learns a module's
shapes by running the model on two and on three samples, and a function's shapes by running it on
the fake tensors of the capture. When a module runs, its results must have the shapes of its
stand-ins.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointFunction

from paceline.base.errors import JobError
from paceline.model.attributes import is_same
from paceline.torch_private import pytree
from paceline.torch_private.autograd import apply_function, replaced
from paceline.torch_private.dispatch import without_functions
from paceline.torch_private.modules import HOOKS

OPAQUE = "paceline::opaque"


class CannotRecord(JobError):
    """A forward does something that a recorded graph would lose; raised while the forward is
    recorded.
    """


class TakesGradients(CannotRecord):
    """A forward takes gradients itself, as that of a force field does."""


Shape = tuple[int, ...]


@dataclass(frozen=True)
class GrowingShape:
    """An output's shape, as a function of the number of samples and of the inputs' shapes.

    Each size is that of an input's dim, or a fixed number plus a multiple of the samples of a
    batch.
    """

    fixed: Shape
    per_sample: Shape
    dtype: torch.dtype
    # For each dim the number of the input and its dim that has the same size, or None.
    of_input: tuple[tuple[int, int] | None, ...] = ()

    def at(self, samples: int, inputs: Sequence[Shape] = ()) -> Shape:
        """Return the shape for a number of samples and the shapes of the call's inputs."""
        grown = tuple(a + b * samples for a, b in zip(self.fixed, self.per_sample, strict=True))
        return tuple(
            size if source is None else inputs[source[0]][source[1]]
            for size, source in zip(grown, self.of_input or (None,) * len(grown), strict=True)
        )

    @classmethod
    def through(
        cls, two: torch.Tensor, three: torch.Tensor, inputs: Sequence[tuple[Shape, Shape]]
    ) -> GrowingShape:
        """Make the shape from the outputs, and the shapes of each input, for two and for three
        samples.
        """
        each = tuple(b - a for a, b in zip(two.shape, three.shape, strict=True))
        return cls(
            tuple(a - 2 * b for a, b in zip(two.shape, each, strict=True)),
            each,
            two.dtype,
            tuple(
                _source(dim, sizes, inputs)
                for dim, sizes in enumerate(zip(two.shape, three.shape, strict=True))
            ),
        )


def _source(
    dim: int, sizes: tuple[int, int], inputs: Sequence[tuple[Shape, Shape]]
) -> tuple[int, int] | None:
    """Return the number and the dim of an input with the sizes that an output has along a dim, or
    None.

    The sizes must be equal for two and for three samples. The same dim of an input is preferred.
    Other dims count only if the two sizes differ.
    """
    alike = [
        (number, place)
        for number, shapes in enumerate(inputs)
        for place, pair in enumerate(zip(*shapes, strict=True))
        if pair == sizes
    ]
    return next(
        (source for source in alike if source[1] == dim),
        alike[0] if alike and sizes[0] != sizes[1] else None,
    )


@dataclass(frozen=True)
class Outputs:
    """The result of a call: its structure, the shapes of its tensors, and its other values by
    position.
    """

    spec: pytree.TreeSpec
    shapes: tuple[GrowingShape, ...]
    constants: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One call of a module or of an autograd function that is taken whole in a capture."""

    target: nn.Module | type[torch.autograd.Function]
    in_spec: pytree.TreeSpec
    constants: Mapping[int, Any]  # arguments that are no tensors, by position
    outputs: Outputs
    shapes: Sequence[Shape]  # of the results
    has_gradients: bool  # whether gradients were enabled at the call
    path: str = ""  # the module's; "" for a function, whose backward a recorded graph would lose
    parameters: tuple[str, ...] = ()  # names of the module's, in the model
    buffers: tuple[str, ...] = ()

    def stand_ins(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Return tensors with the shapes of the outputs, on the device of `like`."""
        return [
            like.new_empty(shape, dtype=output.dtype)
            for shape, output in zip(self.shapes, self.outputs.shapes, strict=True)
        ]

    def run(
        self, parameters: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Run the module itself with these parameters, or the function with its own backward, and
        return its tensors. A module uses and changes its own buffers and attributes.

        Raises:
            JobError: a module's results differ from its stand-ins.
        """
        args, kwargs = _filled(self.in_spec, inputs, self.constants)
        names = [name.removeprefix(f"{self.path}.") for name in self.parameters]
        with torch.set_grad_enabled(self.has_gradients and torch.is_grad_enabled()):
            if not isinstance(self.target, nn.Module):
                return tuple(pytree.tensor_leaves(self.target.apply(*args, **kwargs)))
            returned = functional_call(
                self.target,
                dict(zip(names, parameters, strict=True)),
                args,
                kwargs,
                tie_weights=False,
            )
        tensors, others, _ = _taken_apart(returned)
        if [tuple(tensor.shape) for tensor in tensors] != list(self.shapes) or not is_same(
            others, dict(self.outputs.constants)
        ):
            raise JobError(
                f"'{self.path}' is not looked into, since its course depends on values, and it returned "
                f"{_shown(tensors, others)} where {_shown(self.shapes, self.outputs.constants)} "
                "was recorded for such inputs",
                hint="a size is known beforehand if it is one of its inputs' or grows with the samples; "
                "data=N and shard=N plans run the model as it is",
            )
        return tuple(tensors)


class _Calls(list[Call]):
    """The calls of the capture that is being made.

    The number that the operator is given is an index into them.
    """

    has_gradients = True  # whether gradients are enabled around the capture; not in an evaluation


_CALLS = _Calls()


@torch.library.custom_op(OPAQUE, mutates_args=())
def _opaque(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    raise AssertionError("stands for a call in a capture and is never run")


@_opaque.register_fake
def _(inputs: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return _CALLS[number].stand_ins(inputs[0])


def _gradient(context: Any, *gradients: torch.Tensor) -> Any:
    raise AssertionError("a capture has no backward")


_opaque.register_autograd(_gradient)


def record(call: Call, inputs: Sequence[torch.Tensor]) -> Any:
    """Put a call into the graph that is being recorded, and return its stand-ins.

    Gradients are enabled or disabled as around the capture, because export moves other code into a
    graph of its own.
    """
    _CALLS.append(call)
    is_as_around = (
        torch.is_grad_enabled() == _CALLS.has_gradients
    )  # export takes long for each change
    with nullcontext() if is_as_around else torch.set_grad_enabled(_CALLS.has_gradients):
        made = _opaque(list(inputs), len(_CALLS) - 1)
    return _filled(call.outputs.spec, made, call.outputs.constants)


def _filled(
    spec: pytree.TreeSpec, tensors: Sequence[torch.Tensor], constants: Mapping[int, Any]
) -> Any:
    remaining = iter(tensors)
    return pytree.tree_unflatten(
        [
            constants[i] if i in constants else next(remaining)
            for i in range(len(tensors) + len(constants))
        ],
        spec,
    )


def _taken_apart(values: Any) -> tuple[list[torch.Tensor], dict[int, Any], pytree.TreeSpec]:
    """Return the tensors in a structure, its other values by position, and the structure itself."""
    flat, spec = pytree.tree_flatten(values)
    return (
        pytree.tensor_leaves(flat),
        {i: leaf for i, leaf in enumerate(flat) if not isinstance(leaf, torch.Tensor)},
        spec,
    )


@dataclass
class OpaqueModules:
    """The modules of a model that are taken whole, with their results.

    Modules are added when captures fail.
    """

    outputs: dict[str, list[Outputs]] = field(default_factory=dict)

    def learn(self, model: nn.Module, paths: Sequence[str], run: Callable[[int], Any]) -> None:
        """Add modules: run the model on two and on three samples and note what they return, call by
        call.

        Args:
            run: Runs the model on a number of samples and leaves its state as it was.
        """
        returned: dict[int, dict[str, list[Any]]] = {2: {}, 3: {}}
        for samples, calls in returned.items():
            handles = [
                model.get_submodule(path).register_forward_hook(
                    lambda module, args, kwargs, output, path=path, calls=calls: calls.setdefault(
                        path, []
                    ).append(
                        (
                            _shapes(args, kwargs),
                            pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output),
                        )
                    ),
                    with_kwargs=True,
                )
                for path in paths
            ]
            try:
                run(samples)
            finally:
                for handle in handles:
                    handle.remove()
        for path in returned[2]:
            if len(returned[2][path]) != len(returned[3].get(path, [])):
                raise CannotRecord(
                    f"'{path}' is called a number of times that depends on the batch"
                )
            self.outputs[path] = [
                _outputs(path, two, three)
                for two, three in zip(returned[2][path], returned[3].get(path, []), strict=True)
            ]
        for path in list(self.outputs):
            if any(path.startswith(f"{outer}.") for outer in self.outputs):
                del self.outputs[path]

    @contextmanager
    def standing_in(self, model: nn.Module, samples: int) -> Iterator[list[Call]]:
        """Let each of these modules return stand-ins in the block, without its hooks, and yield
        their calls.

        The model is captured in the block.
        """
        _CALLS.clear()
        _CALLS.has_gradients = torch.is_grad_enabled()
        saved = []
        for path in self.outputs:
            module = model.get_submodule(path)
            names = ("forward", *HOOKS)
            saved.append(
                (module, {name: vars(module)[name] for name in names if name in vars(module)})
            )
            vars(module).update({name: OrderedDict() for name in HOOKS})
            module.forward = self._stand_in(path, module, samples)
        try:
            yield _CALLS
        finally:
            for module, attributes in saved:
                del (
                    module.forward
                )  # the class's own is there again, or the one that the module was given
                vars(module).update(attributes)

    def _stand_in(self, path: str, module: nn.Module, samples: int) -> Callable[..., Any]:
        count = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            inputs, constants, spec = _taken_apart((args, kwargs))
            returned = self.outputs[path][count % len(self.outputs[path])]
            count += 1
            prefix = f"{path}."
            shapes = _shapes(args, kwargs)
            call = Call(
                module,
                spec,
                constants,
                returned,
                [shape.at(samples, shapes) for shape in returned.shapes],
                torch.is_grad_enabled(),
                path,
                tuple(prefix + name for name, _ in module.named_parameters(remove_duplicate=False)),
                tuple(prefix + name for name, _ in module.named_buffers(remove_duplicate=False)),
            )
            return record(call, inputs)

        return forward


def _shapes(args: Any, kwargs: Any) -> list[Shape]:
    return [tuple(tensor.shape) for tensor in _taken_apart((args, kwargs))[0]]


def _shown(tensors: Sequence[Any], others: Mapping[int, Any]) -> str:
    """Describe the result of a module, from its tensors or their shapes and its other values."""
    shapes = [str(tuple(getattr(tensor, "shape", tensor))) for tensor in tensors]
    return " and ".join(
        [f"a tensor of {shape}" for shape in shapes] + [repr(value) for value in others.values()]
    )


def _outputs(path: str, two: tuple[list[Shape], Any], three: tuple[list[Shape], Any]) -> Outputs:
    tensors, constants, spec = _taken_apart(two[1])
    others, other_constants, _ = _taken_apart(three[1])
    if not is_same(list(constants.values()), list(other_constants.values())):
        raise CannotRecord(
            f"'{path}' returns something that is neither a tensor nor the same for every batch"
        )
    inputs = list(zip(two[0], three[0], strict=False))
    return Outputs(
        spec,
        tuple(GrowingShape.through(a, b, inputs) for a, b in zip(tensors, others, strict=True)),
        constants,
    )


@contextmanager
def functions_kept() -> Iterator[None]:
    """Record a model's own autograd functions as calls in the block, in which this thread captures
    the model.

    Hooks on tensors, and gradients that are computed inside of a forward, are refused: the graph
    would not have them.
    """
    thread, register_hook = threading.get_ident(), torch.Tensor.register_hook

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            threading.get_ident() == thread and cls is CheckpointFunction
        ):  # reentrant: it runs without gradients
            run_function, _, *arguments = args
            return run_function(*arguments)
        if threading.get_ident() != thread or cls.__module__.partition(".")[0] == "torch":
            return apply_function(cls, *args, **kwargs)
        return _record_function(cls, args, kwargs)

    def refuse(tensor: torch.Tensor, hook: Any) -> Any:
        if threading.get_ident() != thread:
            return register_hook(tensor, hook)
        raise CannotRecord(
            "the forward registers a hook on a tensor, which a recorded graph would lose"
        )

    def refuse_backward(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(*args, **kwargs)
        raise TakesGradients("the forward takes gradients with torch.autograd")

    torch.Tensor.register_hook = refuse  # type: ignore[method-assign]
    try:
        with replaced(apply, refuse_backward):
            yield
    finally:
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]


def _record_function(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    inputs, constants, spec = _taken_apart((args, kwargs))
    if any(
        isinstance(leaf, nn.Module) or (callable(leaf) and not isinstance(leaf, type))
        for leaf in constants.values()
    ):
        raise CannotRecord(
            f"{function.__name__} is given a module or a function, whose weights could not be passed on"
        )

    def run() -> Any:
        return apply_function(function, *args, **kwargs)

    if not inputs:
        return run()
    with disable_proxy_modes_tracing(), without_functions():
        returned = run()
    made, others, returned_spec = _taken_apart(returned)
    if any(tensor is argument for tensor in made for argument in inputs):
        raise CannotRecord(f"{function.__name__} changes its input in place")
    if not made:
        return returned
    shapes = tuple(
        GrowingShape(tuple(map(int, tensor.shape)), (0,) * tensor.ndim, tensor.dtype)
        for tensor in made
    )
    outputs = Outputs(returned_spec, shapes, others)
    call = Call(
        function,
        spec,
        constants,
        outputs,
        [shape.fixed for shape in shapes],
        torch.is_grad_enabled(),
    )
    return record(call, inputs)


def modules_in(traceback: TracebackType | None, model: nn.Module) -> list[str]:
    """Return the paths of the modules whose methods an error came through, outermost first."""
    paths = {id(module): path for path, module in model.named_modules()}
    module_paths: list[str] = []
    while traceback is not None:
        path = paths.get(id(traceback.tb_frame.f_locals.get("self")))
        if path and (not module_paths or module_paths[-1] != path):
            module_paths.append(path)
        traceback = traceback.tb_next
    return module_paths
