"""Whether a block's forward looks at its own number: one that does may do something else than blocks that are like it.

While a block runs, attributes in which it differs from those like it (its number, its path) are values that tell when
they are compared, computed with, looked up or written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from paceline.model.attributes import OF_TORCH


def _telling(kind: type, *left_out: str) -> type[Any]:
    """Values of a kind that tell when one of its special methods is used."""

    def method(name: str) -> Callable[..., Any]:
        plain = getattr(kind, name)

        def told(self: Any, *args: Any) -> Any:
            vars(type(self))["seen"].append(name)
            return plain(self, *args)

        return told

    names = {name for name in vars(kind) if name.startswith("__")} - {"__new__", *left_out}
    return type(
        f"Telling{kind.__name__}",
        (kind,),
        {name: method(name) for name in names if callable(getattr(kind, name))},
    )


# Whoever asks a number for its class, as `isinstance` does, learns nothing of it.
_KINDS = {int: _telling(int, "__getattribute__"), str: _telling(str)}


def numbers(unit: nn.Module, others: Sequence[nn.Module]) -> list[tuple[str, str]]:
    """The attributes in a unit, with the paths of their modules, that others like it have other numbers or texts in."""
    inside = [dict(other.named_modules(remove_duplicate=False)) for other in others]
    return [
        (path, name)
        for path, module in unit.named_modules(remove_duplicate=False)
        for name, value in vars(module).items()
        if type(value) in _KINDS
        and name not in OF_TORCH
        and any(vars(other[path])[name] != value for other in inside)
    ]


@contextmanager
def watched(unit: nn.Module, attributes: Sequence[tuple[str, str]]) -> Iterator[list[str]]:
    """While this is entered, these attributes of a unit tell. Yields what was done with them."""
    seen: list[str] = []
    put: list[tuple[nn.Module, str, Any, Any]] = []
    for path, name in attributes:
        module = unit.get_submodule(path)
        value = vars(module)[name]
        kind = _KINDS[type(value)]
        vars(module)[name] = telling = type(kind.__name__, (kind,), {"seen": seen})(value)
        put.append((module, name, value, telling))
    try:
        yield seen
    finally:
        for module, name, value, telling in put:
            if vars(module).get(name) is telling:
                vars(module)[name] = value
