"""Keys of plans: their allowed values, how values are read, and which values contradict each other.

A strategy declares its own keys in `keys.py` of its folder. That file imports nothing that only
ranks or prices need. `key_registry.py` lists all keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from paceline.base.errors import PlanError, nearest
from paceline.strategies.axes import Axis
from paceline.strategies.plan_fields import Synchronisation

Record = Literal["axes", "sync", "schedule", "modifiers"]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a plan's text."""

    name: str
    record: Record  # the part of a plan that has the value as a field
    default: Any  # the text omits this value
    allowed: str  # the values, as messages show them
    read: Callable[[str, str], Any]  # returns the value from the key and its text; raises PlanError
    problem: Callable[[Any], str]  # says what is wrong with a value by itself; "" if nothing is
    counts_ranks: bool = False  # whether the value is a number of ranks


def is_count(value: Any) -> bool:
    """Whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def as_text(value: Any) -> str:
    """Return a value in the form of a plan's text. Colons separate the numbers of a tuple."""
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def whole_number(name: str, text: str, *, allowed: str) -> int:
    """Read a whole number.

    Raises:
        PlanError: the text is not a whole number.
    """
    if not re.fullmatch(r"\d+", text):
        raise PlanError(f"{name}={text} is not a whole number", hint=f"{name}={allowed}")
    return int(text)


def count(
    name: str,
    record: Record,
    allowed: str,
    *,
    default: int | str | None = 1,
    least: Literal[0, 1] = 1,
    word: str | None = None,
    counts_ranks: bool = False,
) -> Key:
    """Make a key for a whole number of at least `least`, or one word.

    allowed: stands for the number in messages, and for the word if there is one.
    """

    def problem(value: Any) -> str:
        right = value == word or is_count(value) or (value == 0 == least)
        also = f", or {word}" if word else ""
        return "" if right else f"{name}={value} must be a whole number of at least {least}{also}"

    def read(name: str, text: str) -> Any:
        example = allowed if word else "2"
        return text if text == word else whole_number(name, text, allowed=example)

    return Key(name, record, default, allowed, read, problem, counts_ranks)


def choice(name: str, record: Record, values: Sequence[str], *, default: str) -> Key:
    """Make a key for one of a few words."""
    return Key(
        name,
        record,
        default,
        "|".join(values),
        lambda name, text: text,
        lambda value: "" if value in values else f"{name}={value}: {nearest(str(value), values)}",
    )


@cache
def of_axis(axis: Axis) -> Key:
    """Make the key for the number of ranks along an axis."""
    return count(axis.name, "axes", "N", counts_ranks=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKeys:
    """The keys that a strategy adds to plans, with their checks."""

    axes: tuple[Axis, ...] = ()  # of the mesh; each is also a key for a whole number
    keys: tuple[Key, ...] = ()  # all keys that are not axes
    # The kind of synchronisation that has the values of the keys in the record "sync".
    sync: type[Synchronisation] | None = None
    # Adds values that follow from the given values. Raises PlanError for a key that applies to
    # nothing in the plan.
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values
    # Says what is wrong with a plan whose values are right one by one.
    # This function and the two below take a `Plan`.
    problems: Callable[[Any], list[str]] = lambda plan: []
    # Says how a relaxed plan differs from one device; "" for an exact plan.
    relaxes: Callable[[Any], str] = lambda plan: ""
    exact: Callable[[Any], Any] = lambda plan: plan  # returns the plan without that difference

    def all(self) -> tuple[Key, ...]:
        """Return the keys of the axes and all others."""
        return (*map(of_axis, self.axes), *self.keys)
