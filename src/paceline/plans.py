"""How a job is spread over devices: a small frozen value a person can read, write, diff and keep in a file.

A plan is axes (how data and model are split), synchronisation (how updates meet), a schedule (in what order) and
modifiers.
The text form ("data=2 shard=2 zero=2 accumulate=4") is parsing and printing only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import PlanError, nearest
from paceline.strategies import extensions
from paceline.strategies.axes import BUILT_IN, Axis

if TYPE_CHECKING:
    from paceline.strategies.strategy import Strategy

ZeroStage = Literal[1, 2, 3]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
OuterName = Literal["average", "diloco"]
CompressName = Literal["none", "bf16", "int8", "topk", "powersgd"]
RecomputeName = Literal["none", "selective", "full"]
CompileName = Literal["none", "blocks"]
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")
RECOMPUTES: tuple[RecomputeName, ...] = ("none", "selective", "full")
COMPILES: tuple[CompileName, ...] = ("none", "blocks")
OUTERS: tuple[OuterName, ...] = ("average", "diloco")
COMPRESSIONS: tuple[CompressName, ...] = ("none", "bf16", "int8", "topk", "powersgd")


@dataclass(frozen=True, slots=True)
class Axes:
    """Sizes of the mesh axes, outermost first. An axis of size 1 is not there.

    pipeline: ranks that hold consecutive stages of the model.
    parts: ranks that hold modules as a placement says.
    data: replicas whose gradients meet by all-reduce.
    shard: replicas that also share optimizer state, gradients and parameters.
    tensor: ranks that hold parts of each layer.
    others: axes of strategies from outside with their sizes, outside all of these.
    """

    pipeline: int = 1
    parts: int = 1
    data: int = 1
    shard: int = 1
    tensor: int = 1
    others: tuple[tuple[str, int], ...] = ()

    def sizes(self) -> dict[str, int]:
        """Axis name to size, outermost first."""
        return {**dict(self.others), **{axis.name: getattr(self, axis.name) for axis in BUILT_IN}}

    def facts(self) -> tuple[Axis, ...]:
        """What each axis cuts, outermost first."""
        return (*(extensions.axes()[name] for name, _ in self.others), *BUILT_IN)

    def num_ranks(self, has: Callable[[Axis], bool]) -> int:
        """The product of the axes for which something holds."""
        sizes = self.sizes()
        return math.prod(sizes[axis.name] for axis in self.facts() if has(axis))


class _Replicas:
    """Ranks are the product of the axes."""

    __slots__ = ()

    def num_ranks(self, axes: Axes) -> int:
        """Processes that run the plan."""
        return math.prod(axes.sizes().values())

    def num_replicas(self, axes: Axes) -> int:
        """Ranks that see different samples."""
        return axes.num_ranks(lambda axis: axis.cuts_samples)

    def num_copies(self, axes: Axes) -> int:
        """Times that the model's weights are held."""
        return axes.num_ranks(lambda axis: axis.copies_weights)

    def num_workers(self, axes: Axes) -> int:
        """Ranks that compute gradients."""
        return self.num_ranks(axes)

    @property
    def num_cpu_ranks(self) -> int:
        """Ranks, the first ones, that compute on the CPU also where the others have GPUs."""
        return 0


@dataclass(frozen=True, slots=True)
class AllReduce(_Replicas):
    """Every update waits for the gradients of all replicas.

    zero: what the shard axis splits: 1 optimizer state, 2 and gradients, 3 and parameters.
    """

    zero: ZeroStage = 3


@dataclass(frozen=True, slots=True)
class Servers:
    """Parameters and optimizer state live on servers; workers send them gradients and fetch weights.

    server: how many servers, each with a part of the parameters.
    workers: ranks that compute gradients.
    staleness: every step's batch is divided over the workers. With 0 the parts of the gradient are summed to one
        update, and each worker waits for it. Above 0 each part is an update of its own, and a worker starts the next
        one when it has done at most so many more than the slowest; "inf" never waits.
    colocate: "yes" puts the servers into the first workers' processes, "no" gives each a rank of its own.
    damping: "inverse" divides the learning rate of an update by its staleness in steps: by the updates it has not
        seen, over the workers.
    """

    server: int = 0
    workers: int = 0
    staleness: int | Literal["inf"] = 0
    colocate: Literal["yes", "no"] = "no"
    damping: Literal["none", "inverse"] = "none"

    def num_ranks(self, axes: Axes) -> int:
        """Processes that run the plan."""
        return self.workers + (0 if self.colocate == "yes" else self.server)

    def num_replicas(self, axes: Axes) -> int:
        """Parts that a step's batch is cut into."""
        return self.workers

    def num_copies(self, axes: Axes) -> int:
        """Times that the model's weights are held by those that compute with them."""
        return self.workers

    def num_workers(self, axes: Axes) -> int:
        """Ranks that compute gradients."""
        return self.workers

    @property
    def num_cpu_ranks(self) -> int:
        """Ranks, the first ones, that compute on the CPU also where the others have GPUs."""
        return 0 if self.colocate == "yes" else self.server


@dataclass(frozen=True, slots=True)
class Local(_Replicas):
    """Replicas take steps of their own and meet in outer steps.

    local: steps from one outer step to the next. 1 with outer="average" is the synchronous case: gradients meet.
    outer: what becomes of the mean way the replicas went: "average" goes it; "diloco" goes it with Nesterov momentum.
    fragments: groups of parameters whose outer steps are staggered over the `local` steps.
    """

    local: int
    outer: OuterName = "average"
    fragments: int = 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """Where the model's modules go, and in what order the ranks that hold them work.

    place: "auto" or a file with the modules of each part; "" for a plan without parts.
    schedule: of a pipeline.
    microbatches: how many a replica's part of a step is cut into; "auto" is twice as many as ranks.
    virtual: stages a rank holds; above 1 for "interleaved" alone.
    """

    place: str = ""
    schedule: ScheduleName = "1f1b"
    microbatches: int | Literal["auto"] = "auto"
    virtual: int = 1


@dataclass(frozen=True, slots=True)
class Modifiers:
    """What any plan can carry.

    accumulate: micro-batches an update, or "auto": as few as fit each device's memory.
    recompute: "full" keeps only each block's input for backward and computes the rest again; "selective" computes again
        what lies between attention's products.
    compile: "blocks" compiles each repeated block of the model with torch.compile, equal blocks once.
    shares: how the global batch is cut over the replicas: "equal", by the devices' "speed" or "memory",
        or one positive whole number a replica.
    compress: the form in which replicas send each other gradients, or the differences of outer steps.
    deterministic: "yes" for runs that repeat to the bit on the same devices.
    """

    accumulate: int | Literal["auto"] = 1
    recompute: RecomputeName = "none"
    compile: CompileName = "none"
    shares: Literal["equal", "speed", "memory"] | tuple[int, ...] = "equal"
    compress: CompressName = "none"
    deterministic: Literal["yes", "no"] = "no"


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to run a job. `Plan.parse(str(plan)) == plan` for every plan.

    Raises:
        PlanError: a value is out of range or two contradict each other; the message names all of them.
    """

    axes: Axes = field(default_factory=Axes)
    sync: AllReduce | Local | Servers = field(default_factory=AllReduce)
    schedule: Schedule = field(default_factory=Schedule)
    modifiers: Modifiers = field(default_factory=Modifiers)

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise PlanError("; ".join(problems), hint=f"the keys of a plan are {_known_keys()}")

    @property
    def world_size(self) -> int:
        """Ranks the plan needs."""
        return self.sync.num_ranks(self.axes)

    @property
    def uses_extensions(self) -> bool:
        """Whether an axis of the plan is a strategy's from outside."""
        return bool(self.axes.others)

    @property
    def num_workers(self) -> int:
        """Ranks that compute gradients: all but servers of their own."""
        return self.sync.num_workers(self.axes)

    @property
    def num_copies(self) -> int:
        """Times that the model's weights are held, whole or in parts, by ranks that compute with them."""
        return self.sync.num_copies(self.axes)

    @property
    def splits_model(self) -> bool:
        """Whether ranks hold different modules, or parts of layers."""
        return self.axes.num_ranks(lambda axis: not axis.cuts_samples) > 1

    @property
    def model_cut(self) -> tuple[int, ...]:
        """How the model itself is cut; plans that are alike in it have other replicas at most."""
        sizes = self.axes.sizes()
        return tuple(sizes[axis.name] for axis in self.axes.facts() if not axis.cuts_samples)

    @property
    def num_stage_ranks(self) -> int:
        """Ranks that hold consecutive stages, by which micro-batches are scheduled; 1 without a pipeline."""
        return self.axes.pipeline

    @property
    def has_schedule(self) -> bool:
        """Whether the order of a step's micro-batches is a schedule's."""
        return self.num_stage_ranks > 1

    @property
    def num_cpu_ranks(self) -> int:
        """Ranks, the first ones, that compute on the CPU also where the others have GPUs: servers of their own."""
        return self.sync.num_cpu_ranks

    @property
    def replicas(self) -> int:
        """Ranks that see different samples."""
        return self.sync.num_replicas(self.axes)

    @property
    def zero(self) -> ZeroStage:
        """What a shard axis splits."""
        return self.sync.zero if isinstance(self.sync, AllReduce) else 3

    @property
    def num_microbatches(self) -> int:
        """How many a replica's part of a step is cut into, once nothing is left at "auto"."""
        found = self.schedule.microbatches if self.axes.pipeline > 1 else self.modifiers.accumulate
        assert isinstance(found, int), "'auto' is resolved before ranks start"
        return found

    @property
    def outer_steps(self) -> Local | None:
        """How replicas that take steps of their own meet; None if gradients meet in every step."""
        return self.sync if isinstance(self.sync, Local) and self.sync != Local(1) else None

    @property
    def relaxed(self) -> str | None:
        """What the plan gives up against one device; None for an exact plan."""
        given_up = []
        if self.outer_steps is not None:
            given_up.append(f"replicas take {self.outer_steps.local} steps on their own samples between outer steps"
                            + (" with Nesterov momentum" if self.outer_steps.outer == "diloco" else ""))
        given_up += [words for strategy in self._extensions() if (words := strategy.relaxes(self))]
        if self.modifiers.compress != "none":
            what = "what workers and servers" if isinstance(self.sync, Servers) else "what replicas"
            given_up.append(f"{what} send each other is compressed to {self.modifiers.compress}")
        if isinstance(self.sync, Servers) and self.sync.staleness != 0:
            given_up.append("gradients are of weights that miss updates made meanwhile by other workers")
        return "; ".join(given_up) or None

    @property
    def exact(self) -> Plan:
        """This plan with every dial that relaxes it at 0."""
        sync = self.sync if self.outer_steps is None else AllReduce()
        if isinstance(sync, Servers):
            sync = replace(sync, staleness=0, damping="none")
        plan = replace(self, sync=sync, modifiers=replace(self.modifiers, compress="none"))
        for strategy in self._extensions():
            plan = strategy.exact(plan)
        return plan

    def _extensions(self) -> list[Strategy]:
        """Strategies from outside that the plan uses."""
        return [strategy for strategy in extensions.extensions() if strategy.is_active(self)] if (
            self.uses_extensions) else []

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the text form; keys in any order, parted by spaces or commas.

        >>> str(Plan.parse("accumulate=4, shard=2 data=2"))
        'data=2 shard=2 accumulate=4'
        """
        given: dict[str, Any] = {}
        words = [word for word in re.split(r"[\s,]+", text.strip()) if word]
        if not words:
            raise PlanError("the plan is empty", hint="'single' is one device; 'data=2' is two replicas")
        for word in words:
            key, equals, value = word.partition("=")
            if word == "single":
                continue
            if word == "auto":
                raise PlanError("'auto' is no plan: train finds one for it",
                                hint="paceline plan FILE says which plan is the fastest; name it, such as 'data=2'")
            if key in ("single", "auto"):
                raise PlanError(f"'{key}' takes no value, got '{word}'")
            if (spec := _key(key)) is None:
                raise PlanError(f"unknown plan key '{key}', {nearest(key, [*_keys(), 'single', 'auto'])}")
            if not equals or not value:
                raise PlanError(f"plan key '{key}' needs a value", hint=f"{key}={spec.allowed}")
            if key in given:
                raise PlanError(f"plan key '{key}' is given twice: {given[key]} and {value}")
            given[key] = spec.read(key, value)
        if "single" in words and (split := [k for k in given if _splits(k) and given[k] != 1]):
            raise PlanError(f"'single' is one device and contradicts {', '.join(f'{k}={given[k]}' for k in split)}")
        return cls.of(**given)

    @classmethod
    def of(cls, **values: Any) -> Plan:
        """A plan from its keys: `Plan.of(data=2, accumulate="auto")`."""
        for key in values:
            if _key(key) is None:
                raise PlanError(f"unknown plan key '{key}', {nearest(key, _keys())}")
        if "zero" in values and values.get("shard", 1) == 1:
            raise PlanError(f"zero={values['zero']} splits the shard axis, and the plan has none", hint="add shard=N")
        for key in ("schedule", "microbatches", "virtual"):
            if key in values and values.get("pipeline", 1) == 1:
                raise PlanError(f"{key}={values[key]} is about a pipeline, and the plan has none",
                                hint="add pipeline=N" + ("; accumulate=K cuts the steps of other plans"
                                                         if key == "microbatches" else ""))
        if "place" in values and "parts" not in values:
            raise PlanError(f"place={values['place']} needs the number of parts", hint="add parts=N, one a device")
        for key in ("outer", "fragments"):
            if key in values and "local" not in values:
                raise PlanError(f"{key}={values[key]} is about outer steps, and the plan has none", hint="add local=H")
        others = tuple((name, values.pop(name)) for name in [key for key in values if key not in _KEYS])
        given = [key for key in values if _KEYS[key].group == "servers"]
        if given and (missing := [key for key in ("server", "workers") if key not in values]):
            raise PlanError(f"{' '.join(f'{key}={values[key]}' for key in given)} is about servers, and the plan lacks "
                            f"{' and '.join(missing)}", hint="server=S workers=W, each at least 1")
        if "local" in values and "zero" in values:
            raise PlanError(f"zero={values['zero']} and local={values['local']} don't compose: {_LOCAL_IS_ONE_RANK}")
        if "local" in values and given:
            raise PlanError(f"local={values['local']} and server={values['server']} don't compose: replicas meet in "
                            "outer steps or through servers", hint="staleness=K lets workers of servers meet less")
        if "zero" in values and given:
            raise PlanError(f"zero={values['zero']} splits the shard axis, and servers hold the state of this plan")
        if values.get("schedule") == "interleaved":
            values.setdefault("virtual", 2)
        parts = {group: {k: v for k, v in values.items() if _KEYS[k].group == group} for group in (*_GROUPS, *_SYNCS)}
        sync = next((kind(**parts[group]) for group, kind in _SYNCS.items() if parts[group]), AllReduce())
        rest = {group: kind(**parts[group]) for group, kind in _GROUPS.items()}
        return cls(sync=sync, **rest) if not others else cls(
            sync=sync, **{**rest, "axes": replace(rest["axes"], others=_in_order(others))})

    @classmethod
    def read(cls, source: str | Path | Plan) -> Plan:
        """A plan from a plan, its text, or a JSON file such as a run's `plan.json`."""
        if isinstance(source, Plan):
            return source
        if isinstance(source, Path) or str(source).endswith(".json"):
            try:
                document = json.loads(Path(source).read_text())
                return cls.parse(document["plan"] if isinstance(document, dict) else document)
            except (OSError, ValueError, KeyError, AttributeError) as error:
                if isinstance(error, PlanError):
                    raise
                raise PlanError(f"can't read a plan from {source}: {error}",
                                hint='a plan file is {"plan": "data=2"}') from error
        return cls.parse(source)

    def values(self) -> dict[str, Any]:
        """The keys that differ from their defaults, in the canonical order."""
        home = next(group for group, kind in _SYNCS.items() if isinstance(self.sync, kind))
        groups = {home: self.sync, **{group: getattr(self, group) for group in _GROUPS}}
        values = {key: getattr(groups[k.group], key) if k.group in groups else k.default for key, k in _KEYS.items()}
        return {**dict(self.axes.others),
                **{key: value for key, value in values.items() if value != _KEYS[key].default}}

    def with_(self, **values: Any) -> Plan:
        """This plan with the values of some of its keys replaced: `plan.with_(data=4, recompute="full")`.

        Raises:
            PlanError: as `Plan.of`, for an unknown key, a value out of range, or one that contradicts the others.
        """
        return Plan.of(**{**self.values(), **values})

    def of_forwards(self) -> Plan:
        """What is left of the plan where nothing is updated: workers of servers are replicas."""
        if isinstance(self.sync, Servers):
            return replace(self, axes=replace(self.axes, data=self.sync.workers), sync=AllReduce())
        return self

    def with_microbatches(self, count: int) -> Plan:
        """This plan with each replica's part of a step cut into so many micro-batches."""
        return self.with_(microbatches=count) if self.axes.pipeline > 1 else self.with_(accumulate=count)

    def __str__(self) -> str:
        values = self.values()
        words = [f"{key}={_text(value)}" for key, value in values.items()]
        split = any(_splits(key) for key in values)
        return " ".join(words if split else ["single", *words])


@dataclass(frozen=True, slots=True)
class _Key:
    """One key of the text form: where its value lives, what it may be, how it is read."""

    group: str
    default: Any
    allowed: str
    read: Callable[[str, str], Any]


def _whole(key: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        allowed = _KEYS[key].allowed if key in _KEYS else "N"
        raise PlanError(f"{key}={text} is not a whole number", hint=f"{key}={allowed}")
    return int(text)


def _whole_or_auto(key: str, text: str) -> int | str:
    return text if text == "auto" else _whole(key, text)


def _whole_or_inf(key: str, text: str) -> int | str:
    return text if text == "inf" else _whole(key, text)


def _word(key: str, text: str) -> str:
    return text


def _shares(key: str, text: str) -> str | tuple[int, ...]:
    if re.fullmatch(r"[a-zA-Z_-]+", text):
        return text
    return tuple(_whole(key, part) for part in text.split(":"))


_GROUPS: dict[str, Callable[..., Any]] = {"axes": Axes, "schedule": Schedule, "modifiers": Modifiers}
# What a plan's `sync` may be; a plan has the keys of one of them.
_SYNCS: dict[str, type] = {"all_reduce": AllReduce, "local": Local, "servers": Servers}
# Canonical order of the text form: axes outermost first, then synchronisation, schedule, modifiers.
_KEYS: dict[str, _Key] = {
    "pipeline": _Key("axes", 1, "N", _whole),
    "place": _Key("schedule", "", "auto|FILE", _word),
    "parts": _Key("axes", 1, "N", _whole),
    "data": _Key("axes", 1, "N", _whole),
    "shard": _Key("axes", 1, "N", _whole),
    "tensor": _Key("axes", 1, "N", _whole),
    "zero": _Key("all_reduce", 3, "1|2|3", _whole),
    "local": _Key("local", None, "H", _whole),
    "outer": _Key("local", "average", "average|diloco", _word),
    "fragments": _Key("local", 1, "F", _whole),
    "server": _Key("servers", 0, "S", _whole),
    "workers": _Key("servers", 0, "W", _whole),
    "staleness": _Key("servers", 0, "0|K|inf", _whole_or_inf),
    "colocate": _Key("servers", "no", "yes|no", _word),
    "damping": _Key("servers", "none", "none|inverse", _word),
    "schedule": _Key("schedule", "1f1b", "gpipe|1f1b|interleaved|zero-bubble", _word),
    "microbatches": _Key("schedule", "auto", "M|auto", _whole_or_auto),
    "virtual": _Key("schedule", 1, "V", _whole),
    "accumulate": _Key("modifiers", 1, "K|auto", _whole_or_auto),
    "recompute": _Key("modifiers", "none", "none|selective|full", _word),
    "compile": _Key("modifiers", "none", "none|blocks", _word),
    "shares": _Key("modifiers", "equal", "equal|speed|memory|A:B:...", _shares),
    "compress": _Key("modifiers", "none", "none|bf16|int8|topk|powersgd", _word),
    "deterministic": _Key("modifiers", "no", "yes|no", _word),
}
_LOCAL_IS_ONE_RANK = "a local step is taken by one rank, which must hold the whole model"


def _key(name: str) -> _Key | None:
    """Strategies from outside are looked at for keys that are not built in."""
    return _KEYS.get(name) or _keys().get(name)


def _keys() -> dict[str, _Key]:
    """In their canonical order.

    Raises:
        PlanError: a strategy from outside brings a key that is built in.
    """
    if taken := sorted(extensions.axes().keys() & _KEYS.keys()):
        raise PlanError(f"a strategy that is installed brings the plan key '{taken[0]}', which is built in",
                        hint="its axis needs another name; entry points of the group paceline.strategies name it")
    return {**{name: _Key("axes", 1, "N", _whole) for name in extensions.axes()}, **_KEYS}


def _in_order(others: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Axes from outside in their canonical order, without those of one rank."""
    sizes = dict(others)
    return tuple((name, sizes[name]) for name in extensions.axes() if sizes.get(name, 1) != 1)


def _splits(key: str) -> bool:
    """Whether a key can make a plan more than one device."""
    return key not in _KEYS or _KEYS[key].group == "axes" or key in ("server", "workers")


def _known_keys() -> str:
    return ", ".join(f"{key}={spec.allowed}" for key, spec in _keys().items())


def _text(value: Any) -> str:
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _schedule_problems(plan: Plan) -> list[str]:
    order, found = plan.schedule, []
    if order.schedule not in SCHEDULES:
        found.append(f"schedule={order.schedule}: {nearest(str(order.schedule), SCHEDULES)}")
    if order.microbatches != "auto" and not _is_count(order.microbatches):
        found.append(f"microbatches={order.microbatches} must be a whole number of at least 1, or auto")
    if not _is_count(order.virtual):
        found.append(f"virtual={order.virtual} must be a whole number of at least 1")
    elif (order.virtual > 1) != (order.schedule == "interleaved"):
        found.append(f"virtual={order.virtual} contradicts schedule={order.schedule}: several stages a rank is what "
                     "schedule=interleaved means")
    if (order.place != "") != (plan.axes.parts != 1):
        found.append(f"parts={plan.axes.parts} and place={order.place or 'nothing'}: modules are placed with "
                     "place=auto|FILE and parts=N of at least 2")
    if plan.axes.parts != 1 and plan.axes.pipeline != 1:
        found.append("pipeline=N and parts=N: both say where the model's modules go")
    if replace(order, place="") != Schedule() and plan.axes.pipeline == 1:
        found.append("schedule, microbatches and virtual are about a pipeline, and the plan has none: add pipeline=N")
    if plan.axes.pipeline != 1 and plan.modifiers.accumulate != 1:
        found.append(f"accumulate={plan.modifiers.accumulate} and a pipeline: its steps are cut by microbatches=M")
    return found


def _local_problems(plan: Plan) -> list[str]:
    order, found = plan.sync, []
    if not isinstance(order, Local):
        return []
    if not _is_count(order.local):
        found.append(f"local={order.local} must be a whole number of at least 1")
    if order.outer not in OUTERS:
        found.append(f"outer={order.outer}: {nearest(str(order.outer), OUTERS)}")
    if not _is_count(order.fragments):
        found.append(f"fragments={order.fragments} must be a whole number of at least 1")
    elif not found and order.fragments > order.local:
        found.append(f"fragments={order.fragments} and local={order.local}: each fragment has an outer step of its "
                     "own among the local ones, so there can't be more of them")
    if not found and plan.axes.data == 1:
        found.append(f"local={order.local} is about replicas, and the plan has none: add data=N")
    return found


def _server_problems(sync: Servers, axes: Axes) -> list[str]:
    found = [f"{key}={getattr(sync, key)} must be a whole number of at least 1"
             for key in ("server", "workers") if not _is_count(getattr(sync, key))]
    if sync.staleness not in (0, "inf") and not _is_count(sync.staleness):
        found.append(f"staleness={sync.staleness} must be a whole number of at least 0, or inf")
    for key, allowed in (("colocate", ("yes", "no")), ("damping", ("none", "inverse"))):
        if getattr(sync, key) not in allowed:
            found.append(f"{key}={getattr(sync, key)}: {nearest(str(getattr(sync, key)), allowed)}")
    if sync.damping != "none" and sync.staleness == 0:
        found.append(f"damping={sync.damping} is by staleness, and staleness=0 has none")
    if not found and sync.colocate == "yes" and sync.server > sync.workers:
        found.append(f"colocate=yes puts server={sync.server} servers into workers={sync.workers} processes, at most "
                     "one in each")
    if split := [f"{axis}={size}" for axis, size in axes.sizes().items() if size != 1]:
        found.append(f"server={sync.server} and {' '.join(split)}: workers hold the whole model, and servers bring "
                     "their gradients together")
    return found


def _problems(plan: Plan) -> list[str]:
    """Everything that is wrong with a plan's values, in words."""
    mods = plan.modifiers
    found = [f"{axis}={size} must be a whole number of at least 1"
             for axis, size in plan.axes.sizes().items() if not _is_count(size)]
    if isinstance(plan.sync, Servers):
        found += _server_problems(plan.sync, plan.axes)
    elif not _is_count(plan.zero) or plan.zero > 3:
        found.append(f"zero={plan.zero} must be 1, 2 or 3")
    elif plan.zero != 3 and plan.axes.shard == 1:
        found.append(f"zero={plan.zero} splits the shard axis, and the plan has none: add shard=N")
    found += _schedule_problems(plan) + _local_problems(plan)
    if plan.uses_extensions and not found:
        found += [problem for strategy in extensions.extensions() if strategy.is_active(plan)
                  for problem in strategy.problems(plan)]
    if mods.compress not in COMPRESSIONS:
        found.append(f"compress={mods.compress}: {nearest(str(mods.compress), COMPRESSIONS)}")
    elif mods.compress != "none" and plan.axes.data == 1 and not isinstance(plan.sync, Servers):
        found.append(f"compress={mods.compress} is about what replicas send each other, and the plan has none: "
                     "add data=N")
    if mods.accumulate != "auto" and not _is_count(mods.accumulate):
        found.append(f"accumulate={mods.accumulate} must be a whole number of at least 1, or auto")
    if mods.recompute not in RECOMPUTES:
        found.append(f"recompute={mods.recompute}: {nearest(str(mods.recompute), RECOMPUTES)}")
    if mods.deterministic not in ("yes", "no"):
        found.append(f"deterministic={mods.deterministic}: {nearest(str(mods.deterministic), ('yes', 'no'))}")
    if mods.compile not in COMPILES:
        found.append(f"compile={mods.compile}: {nearest(str(mods.compile), COMPILES)}")
    if isinstance(mods.shares, tuple):
        if not all(map(_is_count, mods.shares)):
            found.append(f"shares={_text(mods.shares)} must be whole numbers of at least 1")
        if not found and len(mods.shares) != plan.replicas:
            found.append(f"shares={_text(mods.shares)} has {len(mods.shares)} parts and the plan has "
                         f"{plan.replicas} replicas")
    elif mods.shares not in ("equal", "speed", "memory"):
        found.append(f"shares={mods.shares}: {nearest(str(mods.shares), ['equal', 'speed', 'memory'])}")
    if mods.shares != "equal" and isinstance(plan.sync, Servers) and plan.sync.staleness != 0:
        found.append(f"shares={_text(mods.shares)} and staleness={plan.sync.staleness}: with staleness a part of a "
                     "batch is for whichever worker is free, so a faster one takes more of them by itself")
    return found
