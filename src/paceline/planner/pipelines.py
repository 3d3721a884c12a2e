"""The step of a pipeline of thousands of ranks, played in milliseconds.

Replicas are equal, so one is played. The work of a rank for one micro-batch of one stage (a block) is played once for
every kind of stage. Then the schedule is played with the seconds of these blocks (`strategies/stages/timing.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device, DeviceKind
from paceline.cluster.links import Network
from paceline.cluster.software import PACELINE, Software
from paceline.job import Precision
from paceline.model.cost.profile import Profile
from paceline.planner.program import LoweredStep, fill
from paceline.planner.rank_kinds import Played, samples_of, slowest, stated_rates
from paceline.simulate.play import Player, Timeline
from paceline.simulate.program import COMPUTE, HOST, NETWORK, Allocate, Event, free
from paceline.strategies.costs import HookPoint, allocator_of
from paceline.strategies.plan import Plan, Schedule
from paceline.strategies.stages.cost import (
    RankCost,
    StageCost,
    backward_course,
    ending_course,
    forward_course,
    input_gradients,
)
from paceline.strategies.stages.layer_cut import orders_of, ranks
from paceline.strategies.stages.schedule import ActionKind, in_flight, kinds_of
from paceline.strategies.stages.timing import (
    FIRST,
    LAST,
    MIDDLE,
    ActionSeconds,
    Key,
    rank_ends,
    shortened,
    which,
)

KEPT = 4096  # steps of which blocks are known: as many as a search prices, which asks again for other links and memory
ROUNDED_BYTES = 16  # a ledger's entries are whole bytes, and may be less than their sum before


def least_missing_bytes(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    *,
    batch: int,
    precision: Precision,
    software: Software = PACELINE,
    enough_bytes: float = math.inf,
) -> int:
    """By how much a plan is over its devices' memory at least; 0 where that is not known at a glance: of a pipeline it
    is, by what its first two ranks hold until their first backward is done. Ranks after these hold fewer micro-batches.

    enough_bytes: above 0, and this much, it may be more: nobody plays more of a step than that takes.

    Raises:
        PlanError: as `play_pipeline`.
    """
    if not plan.has_schedule:
        return 0
    missing_bytes = 0
    samples = samples_of(plan, cluster, batch)
    for cost, place in islice(_ranks(profile, plan, cluster, software, samples, precision), 2):
        allocator = allocator_of(plan, place.device, software)
        first_backward = next(k for k, action in enumerate(cost.order) if action.kind != "F")
        highest_bytes = 0.0
        for held_bytes, block in islice(_memory(cost, place), 2 + first_backward):
            if held_bytes + block.peak_bytes <= highest_bytes:
                continue
            highest_bytes = held_bytes + block.peak_bytes
            aside_bytes = sum(allocator.set_aside(int(highest_bytes)).values())
            over_bytes = int(highest_bytes) + aside_bytes - place.device.memory_bytes
            missing_bytes = max(missing_bytes, over_bytes - ROUNDED_BYTES)
            if missing_bytes > 0 and missing_bytes >= enough_bytes:
                return missing_bytes
    return missing_bytes


@dataclass(slots=True)
class _Block:
    """What a rank does for one action.

    self_s: until its computing is done. tail_s: what its network then still has to do. busy_s: of it, computing.
    kept: bytes held more after it, by what they are for. peak_bytes: the most above what was held before.
    """

    self_s: float
    tail_s: float
    busy_s: float
    kept: dict[str, float]
    kept_bytes: float
    peak_bytes: float
    at_peak: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Written:
    """A rank's step, with the events of its actions as far as somebody has asked for them: on any network alike. What
    playing them gave is kept for each device, network and precision; how much memory the device has does not change it.
    """

    lowered: LoweredStep
    events: dict[tuple[object, ...], Sequence[Event]] = field(default_factory=dict)
    blocks: defaultdict[tuple[object, ...], dict[tuple[object, ...], _Block]] = field(
        default_factory=lambda: defaultdict(dict)
    )


class _Place:
    """A kind of rank of a pipeline: its blocks, played when they are first asked for."""

    def __init__(
        self,
        rank: RankCost,
        written: _Written,
        device: Device,
        network: Network,
        precision: Precision,
        software: Software,
    ) -> None:
        self.rank, self.written, self.device, self.network = rank, written, device, network
        self.rates, self.precision = stated_rates(device, software), precision
        last = len(rank.samples) - 1
        self.number_of = {FIRST: 0, MIDDLE: min(1, last), LAST: last}
        self.blocks = written.blocks[device.accelerator, network, precision]
        segments = written.lowered.step.profile.segments
        self.kind_of = {
            stage.segments: tuple(
                (segments[k].repeat, segments[k].unit == "", len(segments[k].gradients))
                for k in stage.segments
            )
            for stage in rank.stages.values()
        }
        self.first_of: dict[tuple[tuple[int, bool, int], ...], StageCost] = {}
        for stage in rank.stages.values():
            self.first_of.setdefault(self.kind_of[stage.segments], stage)

    def of(self, stage: StageCost, kind: str, microbatch: str) -> _Block:
        """Stages of the rank that are alike but for their turn share blocks, and so do all forwards."""
        number, stage_kind = (
            self.number_of[MIDDLE if kind == "F" else microbatch],
            self.kind_of[stage.segments],
        )
        key = (stage_kind, kind, number)
        return self._played(key, lambda: self._events(self.first_of[stage_kind], kind, number))

    def start(self) -> _Block:
        """What comes before the first action."""
        return self._played(
            ("start",), lambda: self.written.lowered.events([("start", HookPoint())])
        )

    def ending(self) -> _Block:
        """What comes after the last action."""
        return self._played(
            ("ending",), lambda: self.written.lowered.events(ending_course(self.rank))
        )

    def _played(self, key: tuple[object, ...], make: Callable[[], Sequence[Event]]) -> _Block:
        if (block := self.blocks.get(key)) is None:
            if (events := self.written.events.get(key)) is None:
                events = self.written.events[key] = make()
            block = self.blocks[key] = self._play(events)
        return block

    def _events(self, stage: StageCost, kind: str, microbatch: int) -> Sequence[Event]:
        lowered, (taken_bytes, regained_bytes) = (
            self.written.lowered,
            (sum(m.num_bytes for m in messages) for messages in (stage.takes, stage.regains)),
        )
        if kind == "I":
            samples = self.rank.samples[0]
            return list(input_gradients(lowered.step.profile, stage, samples))
        if kind == "F":
            forward = lowered.events(forward_course(self.rank, stage, microbatch))
            return (Allocate("communication", taken_bytes), *forward)
        return (
            Allocate("communication", regained_bytes),
            *lowered.events(backward_course(self.rank, stage, microbatch)),
            free("communication", regained_bytes),
            free("communication", taken_bytes),
        )

    def _play(self, events: Sequence[Event]) -> _Block:
        player = Player(self.rates, self.network, precision=self.precision)
        for event in events:
            player.play(event)
        self_s = max(player.clock[COMPUTE], player.clock[HOST])
        memory = player.memory
        return _Block(
            self_s,
            max(0.0, player.clock[NETWORK] - self_s),
            sum(player.busy.values()),
            dict(memory.by_ledger),
            memory.total,
            memory.peak,
            memory.at_peak,
        )


def _ranks(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    software: Software,
    samples: float,
    precision: Precision,
) -> Iterator[tuple[RankCost, _Place]]:
    """Each rank with its place; ranks that are alike share one."""
    num_ranks, unordered = plan.num_stage_ranks, _without_order(plan)
    costs = ranks(
        profile,
        plan,
        software,
        samples=samples,
        flops_per_byte=cluster.devices[0].flops_per_byte(precision),
        most_microbatches=shortened(num_ranks, plan.num_microbatches),
    )
    hosts = _stages_on(cluster, num_ranks, plan.world_size // num_ranks, precision, software)
    places: dict[tuple[int, int], _Place] = {}
    for cost, host in zip(costs, hosts, strict=True):
        if (key := (id(cost.profile), id(host))) not in places:
            device, network = host
            written = _written(cost.profile, unordered, device.kind, samples, software)
            places[key] = _Place(cost, written, device, network, precision, software)
        yield cost, places[key]


@lru_cache(maxsize=256)
def _stages_on(
    cluster: Cluster, count: int, rank_stride: int, precision: Precision, software: Software
) -> list[tuple[Device, Network]]:
    """The slowest device of each of `count` stages, and a network as slow as the slowest. Stages on equal nodes
    share both."""

    def speed(device: Device) -> float:
        return stated_rates(device, software).flops_per_s[precision]

    known: dict[tuple[tuple[int, int], ...], tuple[Device, Network]] = {}
    stages = []
    for number in range(count):
        span = cluster.span(number * rank_stride, rank_stride)
        key = tuple(
            (id(device), id(network)) for device, network in span
        )  # those of the cluster's nodes
        if key not in known:
            known[key] = min((device for device, _ in span), key=speed), software.on(slowest(span))
        stages.append(known[key])
    return stages


@lru_cache(maxsize=256)
def _without_order(plan: Plan) -> Plan:
    """A schedule changes the order of what ranks do, not what each of these takes."""
    return replace(plan, schedule=Schedule())


@lru_cache(maxsize=KEPT)
def _written(
    profile: Profile, plan: Plan, kind: DeviceKind, samples: float, software: Software
) -> _Written:
    sizes = (samples,) * plan.num_microbatches
    return _Written(fill(profile, plan, kind, sizes, snapshot=False, software=software))


def play_pipeline(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    *,
    batch: int,
    precision: Precision,
    software: Software,
) -> list[Played]:
    """The step of each kind of rank.

    Raises:
        PlanError: there are fewer devices than ranks, fewer samples than replicas, or fewer layers than stages.
    """
    samples = samples_of(plan, cluster, batch)
    pipeline = list(_ranks(profile, plan, cluster, software, samples, precision))
    kinds = kinds_of(plan)
    ends_s = rank_ends(
        plan.schedule.schedule,
        _action_seconds(pipeline, kinds, plan.world_size // len(pipeline), software),
        num_ranks=len(pipeline),
        num_microbatches=plan.num_microbatches,
        virtual=plan.schedule.virtual,
    )
    tails_s = [
        max(place.of(stage, kinds[-1], LAST).tail_s for stage in cost.stages.values())
        for cost, place in pipeline
    ]
    step_s = max(end_s + tail_s for end_s, tail_s in zip(ends_s, tails_s, strict=True))
    step_s += max(place.ending().self_s for _, place in pipeline)
    played: dict[int, Played] = {}
    for number, (cost, place) in enumerate(pipeline):
        if id(place) in played:  # a later rank of the same kind holds fewer micro-batches
            continue
        ending = place.ending()
        self_s, busy_s = _seconds(cost, place, kinds)
        exposed_s = self_s - busy_s + tails_s[number] + ending.self_s - ending.busy_s
        breakdown = {
            "compute": busy_s,
            "optimizer": ending.busy_s,
            "communication": max(0.0, exposed_s),
            "bubble": max(0.0, step_s - busy_s - ending.busy_s - exposed_s),
        }
        peak_bytes, ledger = _peak(_held(cost, number, plan), place)
        timeline = Timeline(step_s, breakdown, peak_bytes, ledger, ledger)
        played[id(place)] = Played.of(f"stage {number}", place.device, plan, timeline, software)
    return list(played.values())


def _action_seconds(
    pipeline: Sequence[tuple[RankCost, _Place]],
    kinds: Sequence[ActionKind],
    rank_stride: int,
    software: Software,
) -> Mapping[Key, ActionSeconds]:
    seconds: dict[Key, ActionSeconds] = {}
    known: dict[tuple[object, ...], list[ActionSeconds]] = {}
    for number, (cost, place) in enumerate(pipeline):
        for stage, stage_cost in cost.stages.items():
            for kind in kinds:
                sent_s = 0.0
                for message in (
                    stage_cost.gives
                    if kind == "F"
                    else stage_cost.returns
                    if kind in ("B", "I")
                    else ()
                ):
                    link = place.network.between(number * rank_stride, message.peer * rank_stride)
                    sent_s += message.num_bytes / link.bytes_per_s + link.latency_s
                key = (id(place), stage_cost.segments, kind, sent_s)
                if key not in known:
                    known[key] = [
                        ActionSeconds(
                            place.of(stage_cost, kind, microbatch).self_s,
                            sent_s,
                            software.waits_for_sends,
                        )
                        for microbatch in (FIRST, MIDDLE, LAST)
                    ]
                for microbatch, figure in zip((FIRST, MIDDLE, LAST), known[key], strict=True):
                    seconds[stage, kind, microbatch] = figure
    return seconds


def _seconds(cost: RankCost, place: _Place, kinds: Sequence[ActionKind]) -> tuple[float, float]:
    """Of all actions of a rank: until their computing is done, and of it computing."""
    count = len(cost.samples)
    repeats = {FIRST: 1, MIDDLE: count - 2, LAST: 1} if count > 1 else {LAST: 1}
    blocks = [
        (times, place.of(stage, kind, microbatch))
        for stage in cost.stages.values()
        for kind in kinds
        for microbatch, times in repeats.items()
    ]
    return sum(times * block.self_s for times, block in blocks), sum(
        times * block.busy_s for times, block in blocks
    )


def _memory(cost: RankCost, place: _Place) -> Iterator[tuple[float, _Block]]:
    """What a rank holds before it does something, and what it does: the start, its actions and the ending."""
    held_bytes, last = cost.batch_bytes, max(action.microbatch for action in cost.order)
    blocks: dict[tuple[int, str, str], _Block] = {}
    yield held_bytes, place.start()
    held_bytes += place.start().kept_bytes
    for action in cost.order:
        key = (action.stage, action.kind, which(action.microbatch, last + 1))
        block = blocks.get(key) or blocks.setdefault(
            key, place.of(cost.stages[action.stage], action.kind, key[2])
        )
        yield held_bytes, block
        held_bytes += block.kept_bytes
    yield held_bytes, place.ending()


def _held(cost: RankCost, number: int, plan: Plan) -> RankCost:
    """The cost of a rank's whole order where its schedule holds every micro-batch, so that fewer of them hold less."""
    num_forwards = sum(action.kind == "F" for action in cost.order)
    if in_flight(cost.order) < num_forwards:
        return cost
    schedule = plan.schedule
    orders = orders_of(
        schedule.schedule, plan.num_stage_ranks, plan.num_microbatches, schedule.virtual
    )
    return replace(cost, order=orders[number])


def _peak(cost: RankCost, place: _Place) -> tuple[int, dict[str, int]]:
    """The most bytes that a rank holds, and what they are for."""
    walk = list(_memory(cost, place))
    highest = [held_bytes + block.peak_bytes for held_bytes, block in walk]
    position = highest.index(max(highest))
    ledger: dict[str, float] = defaultdict(float, activations=cost.batch_bytes)
    for _, block in walk[:position]:
        for name, num_bytes in block.kept.items():
            ledger[name] += num_bytes
    for name, num_bytes in walk[position][1].at_peak.items():
        ledger[name] += num_bytes
    return round(highest[position]), {name: round(size) for name, size in ledger.items()}
