"""Text and tables converted to annotated types by msgspec, with messages that say what is
allowed.
"""

from __future__ import annotations

import contextlib
import numbers
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from paceline.base.errors import nearest

_WORDS = {
    "none": None,
    "null": None,
    "true": True,
    "yes": True,
    "on": True,
    "false": False,
    "no": False,
    "off": False,
}


def convert(value: Any, kind: Any) -> Any:
    """Return the value as `kind`. Text is parsed, other values are checked.

    >>> convert("1e3", int), convert("none", int | None), convert("3,4", tuple[float, ...])
    (1000, None, (3.0, 4.0))

    Raises:
        ValueError: the value isn't of that kind.
    """
    for reading in _readings(value, kind):
        with contextlib.suppress(msgspec.ValidationError):
            return _converted(reading, kind)
    raise ValueError(value)


def _readings(value: Any, kind: Any) -> Iterator[Any]:
    """Yield the values that a value can mean.

    For text, values that few types accept come first, and the text itself comes last.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):  # numpy's
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, str):
        if value.lower() in _WORDS:
            yield _WORDS[value.lower()]
        with contextlib.suppress(ValueError):
            yield _number(value)
        if kind is not Any:
            inner = value.strip().strip("()[]").rstrip(",")
            parts = [part.strip() for part in inner.split(",")] if inner else []
            yield [next(_readings(part, Any)) for part in parts]
            yield parts
    yield value


def _number(text: str) -> float:
    with contextlib.suppress(ValueError):
        return int(text)
    number = float(text)
    return int(number) if number.is_integer() else number  # 1e6


def _converted(value: Any, kind: Any) -> Any:
    try:  # leniently, except for whole numbers: 1 is not True
        return msgspec.convert(value, kind, strict=isinstance(value, int))
    except TypeError:  # a type or a union that msgspec doesn't know
        if get_origin(kind) not in (Union, types.UnionType):
            if isinstance(value, str):
                raise msgspec.ValidationError from None
            return value  # the user's own code gave it
    for member in get_args(kind):
        with contextlib.suppress(msgspec.ValidationError):
            return _converted(value, member)
    raise msgspec.ValidationError


def problems(
    table: Mapping[str, Any], kinds: Mapping[str, Any], *, needed: Collection[str] = ()
) -> dict[str, str]:
    """Return all that is wrong with a table of a file, by field.

    Args:
        kinds: The type of each field that the table may have.
        needed: The fields that it must have.
    """
    wrong = {
        name: f"unknown field '{name}', {nearest(name, kinds)}"
        for name in table
        if name not in kinds
    }
    wrong |= {
        name: f"'{name}' is missing: {allowed(kinds[name])}" for name in needed if name not in table
    }
    for name in [name for name in kinds if name in table]:
        try:
            msgspec.convert(table[name], kinds[name])
        except msgspec.ValidationError:
            wrong[name] = f"{name} = {table[name]!r} must be {allowed(kinds[name])}"
    return wrong


def allowed(kind: Any) -> str:
    """Describe the values that a type takes.

    `msgspec.Meta(description=...)` overrides the description.
    """
    origin, options = get_origin(kind), get_args(kind)
    if origin is Annotated:
        described = (mark.description for mark in options[1:] if isinstance(mark, msgspec.Meta))
        return next(filter(None, described), None) or allowed(options[0])
    if origin is Literal:
        return " or ".join(map(str, options))
    if origin in (Union, types.UnionType):
        return " or ".join(map(allowed, options))
    if (origin or kind) in (tuple, list):
        if origin is tuple and options[-1] is not Ellipsis:
            return f"{len(options)} values parted by commas: {', '.join(map(allowed, options))}"
        return f"values parted by commas, each {allowed(options[0]) if options else 'a value'}"
    plain = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "none",
    }
    return (
        plain.get(kind) or f"of type {getattr(kind, '__name__', kind)}, which only Python can set"
    )
