"""Snapshots of all state that a model's forward may change, to compare it with later state and to
restore it.
"""

from __future__ import annotations

import inspect
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.model.attributes import AttributeSnapshot, is_same


class StateSnapshot:
    """A model's state at one moment: plain attributes, buffers, parameters that are changed in
    place, and generators.

    Parameters are copied when an operator is about to change one, while `watching` is entered.
    Generators are the global ones of Python, NumPy and torch's CPU, and those that modules keep as
    attributes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.attributes = AttributeSnapshot(model)
        self.buffers = {name: (buffer, buffer.detach().clone()) for name, buffer in _buffers(model)}
        self._parameters = {p.untyped_storage()._cdata: p for p in model.parameters()}
        self._before: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        self._generators = [(put, get()) for get, put in generators(model)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the values of parameters that are about to be changed in the block."""
        with _BeforeWrites(self._keep):
            yield

    def _keep(self, written: torch.Tensor) -> None:
        parameter = self._parameters.get(written.untyped_storage()._cdata)
        if parameter is not None and id(parameter) not in self._before:
            self._before[id(parameter)] = parameter, parameter.detach().clone()

    def changed_buffers(self) -> list[str]:
        """Return the names of buffers that have another value now, or are new."""
        return [
            name
            for name, buffer in _buffers(self.model)
            if name not in self.buffers or not is_same(buffer.detach(), self.buffers[name][1])
        ]

    def restore(self) -> None:
        """Put everything back as it was."""
        self.restore_tensors()
        self.attributes.restore()

    def restore_tensors(self) -> None:
        """Put parameters, buffers and generators back, and leave attributes as they are."""
        with torch.no_grad():
            for parameter, before in self._before.values():
                parameter.copy_(before)
            for name, (buffer, value) in self.buffers.items():
                path, _, attribute = name.rpartition(".")
                self.model.get_submodule(path)._buffers[attribute] = buffer
                if not is_same(buffer.detach(), value):
                    buffer.copy_(value)
        self._before.clear()
        for put, state in self._generators:
            put(state)


_STRUCTURE = frozenset(nn.Module().__dict__)


class Bindings:
    """The objects in the attributes of a model's modules at one moment, and the contents of their
    containers.

    Nothing is copied and no tensor is read, so tensors may be fake.

    Args:
        besides: Names of attributes that are left alone; by default those of `nn.Module` itself.
    """

    def __init__(self, model: nn.Module, besides: frozenset[str] = _STRUCTURE) -> None:
        self.besides = besides
        self.modules = [
            (
                module,
                {
                    name: (value, _contents(value))
                    for name, value in vars(module).items()
                    if name not in besides
                },
            )
            for module in model.modules()
        ]

    def restore(self) -> None:
        for module, attributes in self.modules:
            for name in [
                name for name in vars(module) if name not in attributes and name not in self.besides
            ]:
                del vars(module)[name]
            for name, (value, contents) in attributes.items():
                vars(module)[name] = value
                _refill(value, contents)


_NAMED = (dict, OrderedDict)


def _contents(value: Any) -> Any:
    """Return the content of a container, and of those inside it; None for other values."""
    if type(value) in _NAMED:
        return {key: (item, _contents(item)) for key, item in value.items()}
    if type(value) in (list, deque, set):
        return [(item, _contents(item)) for item in value]
    return None


def _refill(value: Any, contents: Any) -> None:
    if contents is None:
        return
    is_named = type(value) in _NAMED
    items = contents.values() if is_named else contents
    for item, inside in items:
        _refill(item, inside)
    value.clear()
    if is_named or type(value) is set:
        value.update(
            {key: item for key, (item, _) in contents.items()}
            if is_named
            else [item for item, _ in contents]
        )
    else:
        value.extend(item for item, _ in contents)


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_buffers()


Generator = tuple[
    Callable[[], Any], Callable[[Any], Any]
]  # what gives a generator's state, and what sets it


def generators(model: nn.Module) -> list[Generator]:
    """Return the global random generators except those of GPUs, and those that modules keep as
    attributes.
    """
    import numpy as np

    accessors: list[Generator] = [
        python_generator(),
        numpy_generator(),
        (torch.default_generator.get_state, torch.default_generator.set_state),
    ]
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, random.Random):
                accessors.append((value.getstate, value.setstate))
            elif isinstance(value, torch.Generator):
                accessors.append((value.get_state, value.set_state))
            elif isinstance(value, np.random.Generator):
                bits = value.bit_generator
                accessors.append(
                    (
                        lambda bits=bits: bits.state,  # type: ignore[misc]
                        lambda state, bits=bits: setattr(bits, "state", state),  # type: ignore[misc]
                    )
                )
            elif isinstance(value, np.random.RandomState):
                accessors.append((value.get_state, value.set_state))
    return accessors


def python_generator() -> Generator:
    return random.getstate, random.setstate


def numpy_generator() -> Generator:
    import numpy as np

    return np.random.get_state, np.random.set_state


def draws_state() -> tuple[Any, Any, Any]:
    """Return the state of Python's and NumPy's global generators, to compare it with a later
    one.
    """
    import numpy as np

    numbers: Any = np.random.get_state()
    return random.getstate(), numbers[2], bytes(numbers[1])


@contextmanager
def generators_kept(model: nn.Module) -> Iterator[None]:
    """Restore the global generators, and those that modules keep as attributes, after the block."""
    saved = [(put, get()) for get, put in generators(model)]
    try:
        yield
    finally:
        for put, state in saved:
            put(state)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restore a model's state after the block, whatever its forward does to it.

    A model of fake tensors has no values, so only the objects in its attributes are restored.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if any(isinstance(p, FakeTensor) for p in model.parameters()):
        bindings = Bindings(model)
        try:
            with generators_kept(model):
                yield
        finally:
            bindings.restore()
        return
    snapshot = StateSnapshot(model)
    try:
        with snapshot.watching():
            yield
    finally:
        snapshot.restore()


@contextmanager
def function_kept(function: Any, apart_from: nn.Module) -> Iterator[None]:
    """Restore the state of a function after the block: attributes of its object or modules,
    variables of its closure.

    Args:
        apart_from: A model whose state is restored elsewhere.
    """
    known = {id(module) for module in apart_from.modules()}
    objects = [value for value in _behind(function) if id(value) not in known]
    cells = [
        cell for value in (function, *objects) for cell in getattr(value, "__closure__", None) or ()
    ]
    values = [
        (cell, cell.cell_contents, _contents(cell.cell_contents))
        for cell in cells
        if _is_filled(cell)
    ]
    attributes = [
        (vars(value), {name: (item, _contents(item)) for name, item in vars(value).items()})
        for value in objects
        if type(getattr(value, "__dict__", None)) is dict
        and not isinstance(value, nn.Module | type)
        and not inspect.isroutine(value)
    ]
    with ExitStack() as kept:
        for module in objects:
            if isinstance(module, nn.Module):
                kept.enter_context(state_kept(module))
        try:
            yield
        finally:
            for cell, value, contents in values:
                cell.cell_contents = value
                _refill(value, contents)
            for names, items in attributes:
                names.clear()
                names.update({name: item for name, (item, _) in items.items()})
                for item, contents in items.values():
                    _refill(item, contents)


def _behind(function: Any) -> list[Any]:
    """Return the function without its wrappers, the object of which it is a method, and the values
    of its closure.
    """
    if isinstance(function, partial):
        return [
            value
            for part in (function.func, *function.args)
            if callable(part)
            for value in _behind(part)
        ]
    cells = [
        cell.cell_contents
        for cell in getattr(function, "__closure__", None) or ()
        if _is_filled(cell)
    ]
    owner = getattr(function, "__self__", None)
    return [
        function,
        *([] if owner is None else [owner]),
        *(value for value in cells if callable(value)),
    ]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


class _BeforeWrites(TorchDispatchMode):
    """A mode that reports each tensor that an operator is about to change."""

    def __init__(self, tell: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable:
            named = (
                dict(zip((argument.name for argument in schema.arguments), args, strict=False))
                | kwargs
            )
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for leaf in pytree.tree_leaves(named.get(argument.name)):
                        if isinstance(leaf, torch.Tensor):
                            self.tell(leaf)
        return func(*args, **kwargs)
