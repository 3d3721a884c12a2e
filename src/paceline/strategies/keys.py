"""Keys of plans: what a value may be, how it is read and what it contradicts.

A strategy declares its own in `keys.py` of its folder, which imports nothing that only ranks or prices need.
`key_registry.py` lists them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from paceline.base.errors import PlanError, nearest
from paceline.strategies.axes import Axis

if TYPE_CHECKING:
    from paceline.strategies.plan import Plan
    from paceline.strategies.synchronisation import Synchronisation

Record = Literal["axes", "sync", "schedule", "modifiers"]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a plan's text.

    record: the part of a plan that has the value as a field.
    default: the value that the text leaves out.
    allowed: the values, as messages show them.
    read: the value from the key and its text. Raises PlanError.
    problem: what is wrong with a value by itself, in words; "" for a right one.
    counts_ranks: whether it says how many ranks there are.
    """

    name: str
    record: Record
    default: Any
    allowed: str
    read: Callable[[str, str], Any]
    problem: Callable[[Any], str]
    counts_ranks: bool = False


def is_count(value: Any) -> bool:
    """Whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def as_text(value: Any) -> str:
    """A value as a plan's text has it: whole numbers are parted by colons."""
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def whole_number(name: str, text: str, *, allowed: str) -> int:
    """
    Raises:
        PlanError: the text is none.
    """
    if not re.fullmatch(r"\d+", text):
        raise PlanError(f"{name}={text} is not a whole number", hint=f"{name}={allowed}")
    return int(text)


def count(
    name: str, record: Record, letter: str, *, default: int | None = 1, counts_ranks: bool = False
) -> Key:
    """A key for a whole number of at least 1. letter: for it in messages."""
    return Key(
        name,
        record,
        default,
        letter,
        lambda name, text: whole_number(name, text, allowed=letter),
        lambda value: (
            "" if is_count(value) else f"{name}={value} must be a whole number of at least 1"
        ),
        counts_ranks,
    )


def count_or(
    word: str,
    name: str,
    record: Record,
    *,
    default: int | str,
    allowed: str,
    least: Literal[0, 1] = 1,
) -> Key:
    """A key for a whole number of at least `least`, or one word."""

    def problem(value: Any) -> str:
        right = value == word or is_count(value) or (value == 0 == least)
        return (
            "" if right else f"{name}={value} must be a whole number of at least {least}, or {word}"
        )

    return Key(
        name,
        record,
        default,
        allowed,
        lambda name, text: text if text == word else whole_number(name, text, allowed=allowed),
        problem,
    )


def choice(name: str, record: Record, values: Sequence[str], *, default: str) -> Key:
    """A key for one of a few words."""
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
    """The key that says how many ranks there are along an axis."""
    return count(axis.name, "axes", "N", counts_ranks=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKeys:
    """What a strategy brings to plans.

    axes: of the mesh; each is a key, for a whole number. keys: the others.
    sync: the kind of synchronisation that has the values of the keys in the record "sync".
    complete: the values that a plan is made from, with those that follow from them. Raises PlanError for a key that
        is about nothing in the plan.
    problems: what is wrong with a plan whose values are each right, in words.
    relaxes: what a plan gives up against one device; "" for an exact one. exact: the plan without that.
    """

    axes: tuple[Axis, ...] = ()
    keys: tuple[Key, ...] = ()
    sync: type[Synchronisation] | None = None
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values
    problems: Callable[[Plan], list[str]] = lambda plan: []
    relaxes: Callable[[Plan], str] = lambda plan: ""
    exact: Callable[[Plan], Plan] = lambda plan: plan

    def all(self) -> tuple[Key, ...]:
        """The keys of the axes and the others."""
        return (*map(of_axis, self.axes), *self.keys)
