"""A plan: one way to distribute a job over devices, as a frozen value that people can read, write
and keep in a file.

A plan consists of axes (how data and model are split), synchronisation (how ranks combine updates),
a schedule (in what order ranks work) and modifiers. This module parses and prints the text form
("data=2 shard=2 zero=2 microbatches=4"). The allowed values of the keys, and their contradictions,
are in `strategies/*/keys.py`.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from paceline.base.errors import PlanError, nearest
from paceline.strategies import extensions
from paceline.strategies.key_registry import BUILT_IN, EARLIER, KEYS, key, keys
from paceline.strategies.keys import PlanKeys, Record, as_text, of_axis
from paceline.strategies.local.keys import Local, outer_steps
from paceline.strategies.modifiers import MICROBATCHES
from paceline.strategies.plan_fields import (
    AllReduce,
    Axes,
    Modifiers,
    PlanFields,
    Schedule,
    Synchronisation,
)
from paceline.strategies.plan_words import meant

ALL_KEYS = "`paceline docs plans` names the page about all keys"


@dataclass(frozen=True, slots=True)
class Plan(PlanFields):
    """One way to run a job. `Plan.parse(str(plan)) == plan` for every plan.

    Raises:
        PlanError: a value is out of range, or values contradict each other. The message names all
            problems.
    """

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise PlanError("\n".join(problems), hint=ALL_KEYS)

    @property
    def outer_steps(self) -> Local | None:
        """The settings of outer steps; None if replicas combine their gradients in every step."""
        return outer_steps(self)

    @property
    def relaxed(self) -> str | None:
        """A description of how the plan's results differ from one device's; None for an exact
        plan."""
        given_up = (plan_keys.relaxes(self) for plan_keys in (*BUILT_IN, *self._outside()))
        return "; ".join(filter(None, given_up)) or None

    @property
    def exact(self) -> Plan:
        """This plan without the settings that relax it."""
        plan = self
        for plan_keys in (*BUILT_IN, *self._outside()):
            plan = plan_keys.exact(plan)
        return plan

    def _outside(self) -> list[PlanKeys]:
        """Return the keys of other packages' strategies that this plan uses."""
        known = extensions.extensions() if self.uses_extensions else ()
        return [strategy.keys for strategy in known if strategy.is_active(self)]

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the text form. Keys come in any order, separated by spaces or commas.

        >>> str(Plan.parse("microbatches=4, shard=2 data=2"))
        'data=2 shard=2 microbatches=4'
        """
        values: dict[str, Any] = {}
        words = [word for word in re.split(r"[\s,]+", text.strip()) if word]
        if not words:
            raise PlanError(
                "the plan is empty", hint="'single' is one device; 'data=2' is two replicas"
            )
        for word in words:
            name, equals, value = word.partition("=")
            if word == "single":
                continue
            if word == "auto":
                raise PlanError(
                    "'auto' is no plan: train finds one for it",
                    hint="paceline plan FILE says which plan is the fastest; name it, such as 'data=2'",
                )
            if name in ("single", "auto"):
                raise PlanError(f"'{name}' takes no value, got '{word}'")
            if (spec := key(name)) is None:
                raise _unknown(words)
            if not equals or not value:
                raise PlanError(f"plan key '{name}' needs a value", hint=f"{name}={spec.allowed}")
            if (name := spec.name) in values:
                raise PlanError(f"plan key '{name}' is given twice: {values[name]} and {value}")
            values[name] = spec.read(name, value)
        if "single" in words and (
            split := [name for name in values if _counts_ranks(name) and values[name] != 1]
        ):
            raise PlanError(
                f"'single' is one device and contradicts "
                f"{', '.join(f'{name}={values[name]}' for name in split)}"
            )
        return cls.of(**values)

    @classmethod
    def of(cls, **values: Any) -> Plan:
        """Make a plan from its keys: `Plan.of(data=2, microbatches="auto")`."""
        given: dict[str, Any] = {}
        for name, value in values.items():
            if (spec := key(name)) is None:
                raise _unknown([f"{name}={as_text(value)}" for name, value in values.items()])
            given[spec.name] = value
        completed: Mapping[str, Any] = given
        for plan_keys in BUILT_IN:
            completed = plan_keys.complete(completed)
        fields: dict[object, dict[str, Any]] = {
            record: {} for record in (*get_args(Record), *_SYNC_OF.values())
        }
        for name in completed.keys() & KEYS.keys():
            fields[_SYNC_OF.get(name, KEYS[name].record)][name] = completed[name]
        sync = next(
            (kind(**fields[kind]) for kind in _SYNC_OF.values() if fields[kind]), AllReduce()
        )
        axes = Axes(others=_others(completed), **fields["axes"])
        return cls(axes, sync, Schedule(**fields["schedule"]), Modifiers(**fields["modifiers"]))

    @classmethod
    def read(cls, source: str | Path | Plan) -> Plan:
        """Read a plan from its text, or from a JSON file such as a run's `plan.json`.

        Returns a plan as it is. Warns of earlier names of keys in a text.
        """
        if isinstance(source, Plan):
            return source
        if isinstance(source, Path) or str(source).endswith(".json"):
            try:
                document = json.loads(Path(source).read_text())
                return cls.parse(document["plan"] if isinstance(document, dict) else document)
            except (OSError, ValueError, KeyError, AttributeError) as error:
                if isinstance(error, PlanError):
                    raise
                raise PlanError(
                    f"can't read a plan from {source}: {getattr(error, 'strerror', None) or error}",
                    hint='a plan file is {"plan": "data=2"}',
                ) from error
        if not isinstance(source, str):
            raise PlanError(f"a plan is text or a Plan, got {source!r}", hint="such as 'data=2'")
        plan = cls.parse(source)
        if re.search(rf"\b({'|'.join(EARLIER)})=|\bplace=auto\b", source):
            warnings.warn(
                f"the plan '{source}' has earlier names of keys; write '{plan}'",
                FutureWarning,
                stacklevel=1,  # once a process, whoever reads it
            )
        return plan

    def values(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults with their values, in the order of a
        plan's text."""
        defaults = {name: spec.default for name, spec in KEYS.items()}
        if self.has_schedule:
            defaults[MICROBATCHES.name] = "auto"
        values = {
            name: getattr(getattr(self, spec.record), name, defaults[name])
            for name, spec in KEYS.items()
        }
        if self.schedule.place == "auto":
            values["place"] = values.pop("parts")
        return {
            **dict(self.axes.others),
            **{name: value for name, value in values.items() if value != defaults[name]},
        }

    def with_(self, **values: Any) -> Plan:
        """Return this plan with some values replaced: `plan.with_(data=4, recompute="full")`.

        Raises:
            PlanError: a key is unknown, a value is out of range, or it contradicts the others; see
                `Plan.of`.
        """
        return Plan.of(**{**self.values(), **values})

    def of_forwards(self) -> Plan:
        """Return the plan for runs without updates: workers of parameter servers become
        replicas."""
        return self.sync.of_forwards(self)

    def __str__(self) -> str:
        values = self.values()
        words = [f"{name}={as_text(value)}" for name, value in values.items()]
        return " ".join(words if any(map(_counts_ranks, values)) else ["single", *words])


# The kind of synchronisation that has the value of each key, by the key's name.
_SYNC_OF: dict[str, type[Synchronisation]] = {
    spec.name: plan_keys.sync
    for plan_keys in BUILT_IN
    if plan_keys.sync
    for spec in plan_keys.keys
    if spec.record == "sync"
}


def _unknown(words: list[str]) -> PlanError:
    """Make the error for a plan's unknown keys, with a line for each of them."""
    known, lines = [*keys(), "single", "auto"], []
    for name in (word.partition("=")[0] for word in words):
        if name in known or key(name) is not None:
            continue
        if (sentence := meant(name)) is not None:
            lines.append(f"'{name}' is no plan key: {sentence}")
        else:
            lines.append(f"unknown plan key '{name}', {nearest(name, known)}")
    return PlanError("\n".join(lines), hint=ALL_KEYS)


def _others(values: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Return the axes of other packages in their usual order, without those of one rank."""
    if values.keys() <= KEYS.keys():
        return ()
    return tuple((name, values[name]) for name in extensions.axes() if values.get(name, 1) != 1)


def _counts_ranks(name: str) -> bool:
    """Whether a key can give a plan more than one device.

    All keys of other packages' strategies can.
    """
    return name not in KEYS or KEYS[name].counts_ranks


def _problems(plan: Plan) -> list[str]:
    """Describe everything that is wrong with a plan's values.

    Contradictions between a strategy's keys are checked only if its own values and those of the
    axes are right.
    """
    sizes = plan.axes.sizes()
    of_axes = [
        words for axis in plan.axes.facts() if (words := of_axis(axis).problem(sizes[axis.name]))
    ]
    problems = list(of_axes)
    for plan_keys in BUILT_IN:
        of_keys = [
            words
            for spec in plan_keys.keys
            if hasattr(record := getattr(plan, spec.record), spec.name)
            and (words := spec.problem(getattr(record, spec.name)))
        ]
        problems += of_keys
        if not of_axes and not of_keys:
            problems += plan_keys.problems(plan)
    if not problems and plan.uses_extensions:
        problems = [words for plan_keys in plan._outside() for words in plan_keys.problems(plan)]
    return problems
