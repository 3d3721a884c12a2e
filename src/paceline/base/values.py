"""Conversion of this package's values to JSON and back. A fork of this process returns its results
this way.

Dataclasses of this package are written by name, with their fields. Tuples stay tuples. Nothing is
pickled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

_PACKAGE = __name__.partition(".")[0]


def _refused(value: Any) -> Any:
    kind = type(value)
    raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not told to other processes")


def plain(value: Any, other: Callable[[Any], Any] = _refused) -> Any:
    """Return a value in a form that JSON can hold.

    Args:
        other: Gives a JSON object for what is none of these; see `base/codec.py`.

    Raises:
        TypeError: it has something else than numbers, text, None, lists, tuples, mappings and
            dataclasses of this package.

    >>> plain({"a": (1, None)})
    {'mapping': [['a', {'tuple': [1, None]}]]}
    """
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list):
        return [plain(each, other) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [plain(each, other) for each in value]}
    if isinstance(value, Mapping):
        return {"mapping": [[plain(key), plain(each, other)] for key, each in value.items()]}
    kind = type(value)
    if not is_dataclass(kind) or kind.__module__.partition(".")[0] != _PACKAGE:
        return other(value)
    return {
        "kind": [kind.__module__, kind.__qualname__],
        "fields": {f.name: plain(getattr(value, f.name), other) for f in fields(kind) if f.init},
    }


def value_of(document: Any, other: Callable[[Any], Any] = _refused) -> Any:
    """Return the value that `plain` converted.

    other: gives the value of an object that the other function of `plain` gave.

    >>> value_of(plain({"a": (1, [2.5])}))
    {'a': (1, [2.5])}
    """
    if isinstance(document, list):
        return [value_of(each, other) for each in document]
    if not isinstance(document, dict):
        return document
    if "tuple" in document:
        return tuple(value_of(each, other) for each in document["tuple"])
    if "mapping" in document:
        return {value_of(key): value_of(each, other) for key, each in document["mapping"]}
    if "kind" not in document:
        return other(document)
    module, name = document["kind"]
    if module.partition(".")[0] != _PACKAGE:
        raise ValueError(f"{module} is not of this package")
    make = getattr(importlib.import_module(module), name)
    if not (isinstance(make, type) and is_dataclass(make)):
        raise ValueError(f"{module}.{name} is no dataclass")
    return make(**{key: value_of(each, other) for key, each in document["fields"].items()})
