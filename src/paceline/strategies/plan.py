"""A plan: one way to distribute a job over devices, as a frozen value that people can read, write
and keep in a file.

A plan consists of axes (how data and model are split), synchronisation (how ranks combine updates),
a schedule (in what order ranks work) and modifiers. This module parses and prints the text form
("data=2 shard=2 zero=2 accumulate=4"). The allowed values of the keys, and their contradictions,
are in `strategies/*/keys.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from paceline.base.errors import PlanError, nearest
from paceline.strategies import extensions
from paceline.strategies.axes import Axis
from paceline.strategies.compile.keys import COMPILE, CompileName
from paceline.strategies.compress.keys import COMPRESS, CompressName
from paceline.strategies.key_registry import AXES, BUILT_IN, KEYS, key, keys
from paceline.strategies.keys import PlanKeys, Record, as_text, of_axis
from paceline.strategies.modifiers import ACCUMULATE, DETERMINISTIC, SHARES
from paceline.strategies.pipeline.keys import MICROBATCHES, SCHEDULE, VIRTUAL, ScheduleName
from paceline.strategies.place.keys import PLACE
from paceline.strategies.plan_words import meant
from paceline.strategies.recompute.keys import RECOMPUTE, RecomputeName
from paceline.strategies.synchronisation import AllReduce, Synchronisation, ZeroStage

if TYPE_CHECKING:
    from paceline.strategies.local.keys import Local


@dataclass(frozen=True, slots=True)
class Axes:
    """Sizes of the mesh axes, outermost first. An axis of size 1 is unused."""

    pipeline: int = 1  # ranks that hold consecutive stages of the model
    parts: int = 1  # ranks that hold the modules that a placement assigns to them
    data: int = 1  # replicas that sum their gradients by all-reduce
    shard: int = 1  # replicas that also share optimizer state, gradients and parameters
    tensor: int = 1  # ranks that hold parts of each layer
    # Axes of other packages' strategies with their sizes. They are outside all axes above.
    others: tuple[tuple[str, int], ...] = ()

    def sizes(self) -> dict[str, int]:
        """Return the size of each axis by name, outermost first."""
        return {**dict(self.others), **{axis.name: getattr(self, axis.name) for axis in AXES}}

    def facts(self) -> tuple[Axis, ...]:
        """Return the axes with what each one cuts, outermost first."""
        return (*(extensions.axes()[name] for name, _ in self.others), *AXES)

    def num_ranks(self, has: Callable[[Axis], bool]) -> int:
        """Return the product of the sizes of the axes for which a predicate holds."""
        sizes = self.sizes()
        return math.prod(sizes[axis.name] for axis in self.facts() if has(axis))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The assignment of the model's modules to ranks, and the order in which these ranks work."""

    # "auto", or a file with the modules of each part; "" for a plan without parts.
    place: str = PLACE.default
    schedule: ScheduleName = SCHEDULE.default  # of a pipeline
    # Number of micro-batches of a replica's part of a step; "auto" is twice the number of ranks.
    microbatches: int | Literal["auto"] = MICROBATCHES.default
    virtual: int = VIRTUAL.default  # stages that a rank holds; above 1 only for "interleaved"


@dataclass(frozen=True, slots=True)
class Modifiers:
    """Settings that any plan can have."""

    # Micro-batches per update. "auto": as few as fit into each device's memory.
    accumulate: int | Literal["auto"] = ACCUMULATE.default
    # "full" keeps only each block's input for backward and recomputes the rest. "selective"
    # recomputes the tensors between attention's products.
    recompute: RecomputeName = RECOMPUTE.default
    # "blocks" compiles each repeated block of the model with torch.compile; equal blocks share one
    # compilation.
    compile: CompileName = COMPILE.default
    # How the global batch is cut over the replicas: "equal", by the devices' "speed" or "memory",
    # or by one positive whole number per replica.
    shares: Literal["equal", "speed", "memory"] | tuple[int, ...] = SHARES.default
    # The form in which replicas send each other gradients, or the pseudo-gradients of outer steps.
    compress: CompressName = COMPRESS.default
    # "yes" for runs that repeat to the bit on the same devices.
    deterministic: Literal["yes", "no"] = DETERMINISTIC.default


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run a job. `Plan.parse(str(plan)) == plan` for every plan.

    Raises:
        PlanError: a value is out of range, or values contradict each other. The message names all
            problems.
    """

    axes: Axes = field(default_factory=Axes)
    sync: Synchronisation = field(default_factory=AllReduce)
    schedule: Schedule = field(default_factory=Schedule)
    modifiers: Modifiers = field(default_factory=Modifiers)

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise PlanError(
                "; ".join(problems),
                hint="the keys of a plan are "
                + ", ".join(f"{name}={spec.allowed}" for name, spec in keys().items()),
            )

    @property
    def world_size(self) -> int:
        """The number of ranks that the plan needs."""
        return self.sync.num_ranks(self.axes)

    @property
    def uses_extensions(self) -> bool:
        """Whether an axis of the plan belongs to a strategy of another package."""
        return bool(self.axes.others)

    @property
    def num_workers(self) -> int:
        """The number of ranks that compute gradients: all ranks except those that are only
        servers."""
        return self.sync.num_workers(self.axes)

    @property
    def num_copies(self) -> int:
        """The number of copies of the model's weights, whole or in parts, on ranks that compute
        with them."""
        return self.sync.num_copies(self.axes)

    @property
    def splits_model(self) -> bool:
        """Whether ranks hold different modules, or parts of layers."""
        return self.axes.num_ranks(lambda axis: not axis.cuts_batch) > 1

    @property
    def model_cut(self) -> tuple[int, ...]:
        """The sizes of the axes that cut the model.

        Plans with equal cuts differ in their replicas at most.
        """
        sizes = self.axes.sizes()
        return tuple(sizes[axis.name] for axis in self.axes.facts() if not axis.cuts_batch)

    @property
    def num_stage_ranks(self) -> int:
        """The number of ranks over which micro-batches are scheduled in stages; 1 without a
        pipeline."""
        return self.axes.pipeline

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule determines the order of a step's micro-batches."""
        return self.num_stage_ranks > 1

    @property
    def num_cpu_ranks(self) -> int:
        """The number of first ranks that use the CPU even if the others have GPUs: they are only
        servers."""
        return self.sync.num_cpu_ranks

    @property
    def replicas(self) -> int:
        """The number of ranks that see different samples."""
        return self.sync.num_replicas(self.axes)

    @property
    def zero(self) -> ZeroStage:
        """The ZeRO stage of the shard axis; see `AllReduce.zero`."""
        return self.sync.zero if isinstance(self.sync, AllReduce) else 3

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a replica's part of a step.

        "auto" must be resolved before.
        """
        count = self.schedule.microbatches if self.has_schedule else self.modifiers.accumulate
        assert isinstance(count, int), "'auto' is resolved before ranks start"
        return count

    @property
    def outer_steps(self) -> Local | None:
        """The settings of outer steps; None if replicas combine their gradients in every step."""
        return self.sync.outer_steps

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

    def _records(self) -> dict[Record, object]:
        """Return the parts of the plan that have the values of its keys as fields."""
        return {
            "axes": self.axes,
            "sync": self.sync,
            "schedule": self.schedule,
            "modifiers": self.modifiers,
        }

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the text form. Keys come in any order, separated by spaces or commas.

        >>> str(Plan.parse("accumulate=4, shard=2 data=2"))
        'data=2 shard=2 accumulate=4'
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
                raise _unknown(name, [*keys(), "single", "auto"])
            if not equals or not value:
                raise PlanError(f"plan key '{name}' needs a value", hint=f"{name}={spec.allowed}")
            if name in values:
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
        """Make a plan from its keys: `Plan.of(data=2, accumulate="auto")`."""
        for name in values:
            if key(name) is None:
                raise _unknown(name, list(keys()))
        completed: Mapping[str, Any] = values
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

        Returns a plan as it is.
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
        return cls.parse(source)

    def values(self) -> dict[str, Any]:
        """Return the keys that differ from their defaults with their values, in the order of a
        plan's text."""
        records = self._records()
        values = {
            name: getattr(records[spec.record], name, spec.default) for name, spec in KEYS.items()
        }
        return {
            **dict(self.axes.others),
            **{name: value for name, value in values.items() if value != KEYS[name].default},
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

    def with_microbatches(self, count: int) -> Plan:
        """Return this plan with each replica's part of a step cut into `count` micro-batches."""
        return self.with_(microbatches=count) if self.has_schedule else self.with_(accumulate=count)

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


def _unknown(name: str, known: list[str]) -> PlanError:
    """Make the error for an unknown key.

    If another tool uses the word, the message names the right key.
    """
    if (words := meant(name)) is not None:
        return PlanError(
            f"'{name}' is no plan key: {words}", hint="known keys: " + ", ".join(known)
        )
    return PlanError(f"unknown plan key '{name}', {nearest(name, known)}")


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
    sizes, records = plan.axes.sizes(), plan._records()
    of_axes = [
        words for axis in plan.axes.facts() if (words := of_axis(axis).problem(sizes[axis.name]))
    ]
    problems = list(of_axes)
    for plan_keys in BUILT_IN:
        of_keys = [
            words
            for spec in plan_keys.keys
            if hasattr(record := records[spec.record], spec.name)
            and (words := spec.problem(getattr(record, spec.name)))
        ]
        problems += of_keys
        if not of_axes and not of_keys:
            problems += plan_keys.problems(plan)
    if not problems and plan.uses_extensions:
        problems = [words for plan_keys in plan._outside() for words in plan_keys.problems(plan)]
    return problems
