"""The values in Python that a forward read while it was captured. They are constants of the
captured graph.

Attributes of modules are noted when they are read. Variables of the user's functions (globals,
closures) are found in the functions' code.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.base.user_code import is_users
from paceline.torch_private.modules import (
    CONTENTS,
    FORWARD_HOOKS,
    own_buffers,
)

# Those of nn.Module's own names on which a forward depends.
_UNREAD = (frozenset(vars(nn.Module)) | frozenset(vars(nn.Module()))) - {
    "training",
    *FORWARD_HOOKS,
}
_LONG, _DEPTH = 256, 4  # longer containers, and what is nested deeper, are compared by identity
_PLAIN = (type(None), bool, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True)
class Reads:
    """The values in Python that a capture read."""

    # Functions that return the current values, by their names in messages.
    places: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    values: Sequence[Any] = ()  # the values at the capture, frozen

    @classmethod
    def of(cls, model: nn.Module, attributes: Iterable[tuple[int, str]]) -> Reads:
        """Return the reads of a model's capture, from the attributes that were read; see
        `attributes_read`.
        """
        modules = {id(vars(module)): (path, module) for path, module in model.named_modules()}
        places: dict[str, Callable[[], Any]] = {}
        for owner, name in attributes:
            path, module = modules.get(owner, ("", None))
            if (
                module is None
                or name in _UNREAD
                or name.startswith("__")
                or _is_of_class(module, name)
            ):
                continue
            places[f"'{path}.{name}'" if path else f"'{name}'"] = partial(_attribute, module, name)
        known: set[Any] = set()
        for module in model.modules():
            for function in _functions_of(module):
                _find_variables(function, places, known)
        return cls(places, _now(places.values()))

    def changed(self) -> list[str]:
        """Return the names of values that have changed."""
        now = _now(self.places.values())
        return (
            []
            if now == self.values
            else [
                name
                for name, before, after in zip(self.places, self.values, now, strict=True)
                if before != after
            ]
        )


@contextmanager
def attributes_read() -> Iterator[dict[tuple[int, str], None]]:
    """Note each attribute of a module that is read in the block: the id of the module's `__dict__`,
    and its name.
    """
    noted: dict[tuple[int, str], None] = {}

    def read(module: nn.Module, name: str) -> Any:
        noted[id(object.__getattribute__(module, "__dict__")), name] = None
        return object.__getattribute__(module, name)

    nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    try:
        yield noted
    finally:
        del nn.Module.__getattribute__


def frozen(value: Any) -> Any:
    """Return a value in Python as it is now, to compare it with a later one.

    Tensors that are no parameters, modules and functions are compared by identity, because a graph
    holds the tensor itself.
    """
    return _frozen(value, _DEPTH, {})


def _now(places: Iterable[Callable[[], Any]]) -> list[Any]:
    known: dict[int, tuple[Any, Any]] = {}
    return [_frozen(place(), _DEPTH, known) for place in places]


def _attribute(module: nn.Module, name: str) -> Any:
    own = vars(module)
    if name in own:
        return own[name]
    if (buffer := own_buffers(module).get(name)) is not None:  # an input of the graph
        return tuple(buffer.shape), buffer.dtype
    return next(
        (own[held][name] for held in CONTENTS if name in own[held]),
        getattr(type(module), name, None),
    )


def _is_of_class(module: nn.Module, name: str) -> bool:
    """Whether an attribute is a method or a property of the module's class."""
    own = vars(module)
    is_own = name in own or any(name in own[held] for held in CONTENTS)
    return not is_own and hasattr(inspect.getattr_static(type(module), name, None), "__get__")


@dataclass(frozen=True, eq=False, slots=True)
class _Same:
    """A wrapper that is equal only to a wrapper of the same object."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def _frozen(value: Any, depth: int, known: dict[int, tuple[Any, Any]]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (int, float, complex):
        return kind, value if value == value else "nan"
    if isinstance(value, nn.Parameter):
        return "trained" if value.requires_grad else "frozen"
    if isinstance(value, np.ndarray | np.generic) and value.size <= _LONG:
        return value.dtype.str, value.shape, value.tobytes()
    if (
        kind is torch.Tensor and value.numel() == 1 and value.device.type == "cpu"
    ):  # a forward may ask for the number
        return _Same(value), value.item()
    inside = None if depth == 0 else _inside(value)
    if inside is None or len(inside) > _LONG:
        return _Same(value), len(inside or ())
    if id(value) not in known:  # it is kept with the value: the id may be given again
        known[id(value)] = value, None  # what refers to itself
        known[id(value)] = (
            value,
            (
                kind,
                [
                    (_frozen(key, depth - 1, known), _frozen(item, depth - 1, known))
                    for key, item in inside
                ],
            ),
        )
    return known[id(value)][1]


def _inside(value: Any) -> Sequence[tuple[Any, Any]] | None:
    """Return the content of a container or of an object of the user's, by key or name; None for
    other values.
    """
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    if isinstance(value, set | frozenset):
        return [(item, None) for item in value]
    if isinstance(
        value, torch.Tensor | nn.Module | type | types.ModuleType | partial
    ) or inspect.isroutine(value):
        return None
    if type(value).__module__.startswith("paceline."):  # such as a script's run, which counts steps
        return None
    if is_dataclass(value):
        return [(each.name, getattr(value, each.name, None)) for each in fields(value)]
    return list(vars(value).items()) if type(getattr(value, "__dict__", None)) is dict else None


def _functions_of(module: nn.Module) -> Iterator[Any]:
    """Yield the functions that a module's forward may run: those of its class, those in its
    attributes, and its hooks.
    """
    own = vars(module)
    for kind in type(module).__mro__:
        yield from vars(kind).values()
    yield from own.values()
    for hooks in FORWARD_HOOKS:
        yield from own[hooks].values()


def _find_variables(function: Any, places: dict[str, Callable[[], Any]], known: set[Any]) -> None:
    """Add the outside variables that a function of the user's uses, and those of the functions that
    it names.
    """
    if isinstance(function, property):
        function = function.fget
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType) or function in known or not is_users(code.co_filename):
        return
    known.add(function)
    names = set(_names(code))
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        _add_variable(
            f"{name} of {function.__qualname__}",
            partial(getattr, cell, "cell_contents", None),
            names,
            places,
            known,
        )
    _add_variables(function.__module__, function.__globals__, names, places, known)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _add_variables(
    owner: str,
    variables: Mapping[str, Any],
    names: set[str],
    places: dict[str, Callable[[], Any]],
    known: set[Any],
) -> None:
    for name in names & variables.keys():
        _add_variable(f"{owner}.{name}", partial(variables.get, name), names, places, known)


def _add_variable(
    label: str,
    place: Callable[[], Any],
    names: set[str],
    places: dict[str, Callable[[], Any]],
    known: set[Any],
) -> None:
    value = place()
    places[label] = place
    if not isinstance(value, type | types.ModuleType):
        _find_variables(value, places, known)
    elif value not in known and _is_users_own(value):
        known.add(value)
        _add_variables(value.__name__, vars(value), names, places, known)


def _is_users_own(value: type | types.ModuleType) -> bool:
    name = value.__module__ if isinstance(value, type) else value.__name__
    file = getattr(sys.modules.get(name, value), "__file__", None)
    return name == "__main__" or (file is not None and is_users(file))
