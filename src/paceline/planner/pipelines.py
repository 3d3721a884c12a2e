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

from paceline.base.errors import PlanError
from paceline.cluster.catalogue import Accelerator
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device, DeviceKind
from paceline.cluster.links import Network
from paceline.cluster.software import PACELINE, Software
from paceline.job import Precision
from paceline.model.cost.profile import Profile
from paceline.planner.program import Item, LoweredStep, fill
from paceline.planner.rank_kinds import Played, samples_of, slowest, stated_rates
from paceline.simulate.accelerator import AcceleratorRates
from paceline.simulate.play import Player, Timeline
from paceline.simulate.program import COMPUTE, HOST, NETWORK, Allocate, Event
from paceline.strategies.costs import HookPoint, allocator_of
from paceline.strategies.plan import Plan, Schedule
from paceline.strategies.stages.by_dimensions import ranks
from paceline.strategies.stages.cost import (
    ENDING,
    RankCost,
    StageCost,
    backward_course,
    forward_course,
    input_gradients,
    tie,
)
from paceline.strategies.stages.schedule import kinds_of
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
    if not cluster.nodes or not profile.by_dimensions or not plan.has_schedule:
        return 0
    missing_bytes = 0
    costs = islice(
        _ranks(profile, plan, cluster, software, samples_of(plan, cluster, batch), precision), 2
    )
    rank_stride = plan.world_size // plan.num_stage_ranks
    stage_places = _stages_on(cluster, plan.num_stage_ranks, rank_stride, precision, software)
    for rank, stage_place in zip(costs, stage_places, strict=False):
        allocator = allocator_of(plan, stage_place.device, software)
        for peak_bytes in _peaks_before_backward(
            rank, _place(rank, plan, stage_place, precision, software)
        ):
            aside_bytes = sum(allocator.set_aside(int(peak_bytes)).values())
            missing_bytes = max(
                missing_bytes,
                int(peak_bytes) - ROUNDED_BYTES + aside_bytes - stage_place.device.memory_bytes,
            )
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
    kept: dict[str, float] = field(default_factory=dict)
    kept_bytes: float = 0.0
    peak_bytes: float = 0.0
    at_peak: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Written:
    """A rank's step, with the events of its actions as far as somebody has asked for them: on any network alike."""

    lowered: LoweredStep
    events: dict[tuple[object, ...], Sequence[Event]] = field(default_factory=dict)


class _Place:
    """A kind of rank of a pipeline: its blocks, played when they are first asked for."""

    def __init__(
        self,
        rank: RankCost,
        written: _Written,
        rates: AcceleratorRates,
        network: Network,
        precision: Precision,
        num_microbatches: int,
        blocks: dict[tuple[object, ...], _Block],
    ) -> None:
        self.rank, self.written, self.rates, self.network = rank, written, rates, network
        self.precision = precision
        self.number_of = {
            FIRST: 0,
            MIDDLE: min(1, num_microbatches - 1),
            LAST: num_microbatches - 1,
        }
        self.blocks = blocks
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

    def _played(self, key: tuple[object, ...], make: Callable[[], Sequence[Event]]) -> _Block:
        if (block := self.blocks.get(key)) is None:
            if (events := self.written.events.get(key)) is None:
                events = self.written.events[key] = make()
            block = self.blocks[key] = self._play(events)
        return block

    def _events(self, stage: StageCost, kind: str, microbatch: int) -> Sequence[Event]:
        taken_bytes = sum(m.num_bytes for m in stage.takes)
        if kind == "F":
            forward = self.written.lowered.events(forward_course(self.rank, stage, microbatch))
            return (Allocate("communication", taken_bytes), *forward)
        freed = Allocate("communication", -taken_bytes)
        if kind == "I":
            return list(
                input_gradients(self.written.lowered.step.profile, stage, self.rank.samples)
            )
        regained_bytes = sum(m.num_bytes for m in stage.regains)
        backward = self.written.lowered.events(backward_course(self.rank, stage, microbatch))
        return (
            Allocate("communication", regained_bytes),
            *backward,
            Allocate("communication", -regained_bytes),
            freed,
        )

    def start(self) -> _Block:
        """What comes before the first action."""
        return self._played(
            ("start",), lambda: self.written.lowered.events([("start", HookPoint())])
        )

    def ending(self) -> _Block:
        """What comes after the last action."""
        course: list[Item] = [(name, HookPoint()) for name in ENDING]
        return self._played(
            ("ending",),
            lambda: self.written.lowered.events(
                [tie(self.rank), *course] if self.rank.tied_bytes else course
            ),
        )

    def _play(self, events: Sequence[Event]) -> _Block:
        player = Player(self.rates, self.network, precision=self.precision)
        for event in events:
            player.play(event)
        self_s = max(player.clock[COMPUTE], player.clock[HOST])
        memory = player.memory
        tail_s = max(0.0, player.clock[NETWORK] - self_s)
        return _Block(
            self_s,
            tail_s,
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
) -> Iterator[RankCost]:
    if not profile.by_dimensions:
        raise PlanError(f"plan '{plan}' splits the model, and what its pieces cost is not known")
    return ranks(
        profile,
        plan,
        software,
        samples=samples,
        flops_per_byte=cluster.devices[0].flops_per_byte(precision),
        most_microbatches=shortened(plan.num_stage_ranks, plan.num_microbatches),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _StagePlace:
    """What the ranks of one stage run on: the slowest device, and a network as slow as the slowest."""

    device: Device
    network: Network


@lru_cache(maxsize=256)
def _stages_on(
    cluster: Cluster, count: int, rank_stride: int, precision: Precision, software: Software
) -> list[_StagePlace]:
    """Of each stage, whose ranks are so many; stages on nodes that are alike share one."""

    def speed(device: Device) -> float:
        return stated_rates(device, software).flops_per_s[precision]

    stage_places: dict[tuple[tuple[int, int], ...], _StagePlace] = {}
    stages = []
    for number in range(count):
        span = cluster.span(number * rank_stride, rank_stride)
        key = tuple(
            (id(device), id(network)) for device, network in span
        )  # those of the cluster's nodes
        if key not in stage_places:
            device = min((device for device, _ in span), key=speed)
            stage_places[key] = _StagePlace(device, software.on(slowest(span)))
        stages.append(stage_places[key])
    return stages


def _place(
    rank: RankCost, plan: Plan, stage_place: _StagePlace, precision: Precision, software: Software
) -> _Place:
    device, unordered = stage_place.device, _without_order(plan)
    written = _written(rank.profile, unordered, device.kind, rank.samples, software)
    network = stage_place.network
    blocks = _blocks(
        rank.profile, unordered, device.accelerator, network, rank.samples, precision, software
    )
    return _Place(
        rank,
        written,
        stated_rates(device, software),
        network,
        precision,
        plan.num_microbatches,
        blocks,
    )


@lru_cache(maxsize=256)
def _without_order(plan: Plan) -> Plan:
    """A schedule changes the order of what ranks do, not what each of these takes."""
    return replace(plan, schedule=Schedule(microbatches=plan.schedule.microbatches))


@lru_cache(maxsize=KEPT)
def _written(
    profile: Profile, plan: Plan, kind: DeviceKind, samples: float, software: Software
) -> _Written:
    return _Written(
        fill(
            profile,
            plan,
            kind,
            (samples,) * plan.num_microbatches,
            snapshot=False,
            software=software,
        )
    )


@lru_cache(maxsize=KEPT)
def _blocks(
    profile: Profile,
    plan: Plan,
    accelerator: Accelerator | None,
    network: Network,
    samples: float,
    precision: Precision,
    software: Software,
) -> dict[tuple[object, ...], _Block]:
    """Those that are known. How much memory the device has does not change them."""
    return {}


def play_pipeline(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    *,
    batch: int,
    precision: Precision,
    software: Software,
) -> tuple[float, list[Played]]:
    """Seconds of a step, and the kinds of ranks.

    Raises:
        PlanError: there are fewer devices than ranks, fewer samples than replicas, or fewer layers than stages.
    """
    samples = samples_of(plan, cluster, batch)
    costs = list(_ranks(profile, plan, cluster, software, samples, precision))
    num_microbatches, rank_stride = plan.num_microbatches, plan.world_size // plan.num_stage_ranks
    stage_places = _stages_on(cluster, len(costs), rank_stride, precision, software)
    place_of: dict[tuple[int, int], _Place] = {}
    for rank, stage_place in zip(costs, stage_places, strict=True):
        if (id(rank.profile), id(stage_place)) not in place_of:
            place_of[id(rank.profile), id(stage_place)] = _place(
                rank, plan, stage_place, precision, software
            )
    places = [
        place_of[id(rank.profile), id(stage_place)]
        for rank, stage_place in zip(costs, stage_places, strict=True)
    ]
    devices = [stage_place.device for stage_place in stage_places]

    kinds = kinds_of(plan)
    action_seconds = _action_seconds(costs, places, kinds, rank_stride, software)
    ends_s = rank_ends(
        plan.schedule.schedule,
        action_seconds,
        num_ranks=plan.num_stage_ranks,
        num_microbatches=num_microbatches,
        virtual=plan.schedule.virtual,
    )
    endings = {id(place): place.ending() for place in place_of.values()}
    tails_s = [
        max(place.of(stage, kinds[-1], LAST).tail_s for stage in cost.stages.values())
        for cost, place in zip(costs, places, strict=True)
    ]
    through_s = max(end_s + tail_s for end_s, tail_s in zip(ends_s, tails_s, strict=True))
    update_s = max(ending.self_s for ending in endings.values())
    played: dict[int, Played] = {}
    for number, (cost, place) in enumerate(zip(costs, places, strict=True)):
        if id(place) in played:  # a later rank of the same kind holds fewer micro-batches
            continue
        self_s, busy_s = _seconds(cost, place, kinds, num_microbatches)
        optimizer_s = endings[id(place)].busy_s
        timeline = _memory_timeline(cost, place, endings[id(place)])
        step_s = through_s + update_s
        exposed_s = self_s - busy_s + tails_s[number] + endings[id(place)].self_s - optimizer_s
        played[id(place)] = Played(
            f"stage {number}",
            devices[number],
            replace(
                timeline,
                step_s=step_s,
                breakdown={
                    "compute": busy_s,
                    "optimizer": optimizer_s,
                    "communication": max(0.0, exposed_s),
                    "bubble": max(0.0, step_s - busy_s - optimizer_s - exposed_s),
                },
            ),
        )
    return through_s + update_s, list(played.values())


def _action_seconds(
    costs: Sequence[RankCost],
    places: Sequence[_Place],
    kinds: Sequence[str],
    rank_stride: int,
    software: Software,
) -> Mapping[Key, ActionSeconds]:
    seconds: dict[Key, ActionSeconds] = {}
    by_key: dict[tuple[object, ...], tuple[ActionSeconds, ActionSeconds, ActionSeconds]] = {}
    for number, (cost, place) in enumerate(zip(costs, places, strict=True)):
        for stage, stage_cost in cost.stages.items():
            for kind in kinds:
                messages = {
                    "F": stage_cost.gives,
                    "B": stage_cost.returns,
                    "I": stage_cost.returns,
                }.get(kind, ())
                sent_s = 0.0
                for message in messages:
                    link = place.network.between(number * rank_stride, message.peer * rank_stride)
                    sent_s += message.num_bytes / link.bytes_per_s + link.latency_s
                key = (id(place), stage_cost.segments, kind, sent_s)
                if key not in by_key:
                    first, middle, last = (
                        ActionSeconds(
                            place.of(stage_cost, kind, microbatch).self_s,
                            sent_s,
                            software.waits_for_sends,
                        )
                        for microbatch in (FIRST, MIDDLE, LAST)
                    )
                    by_key[key] = first, middle, last
                for microbatch, figure in zip((FIRST, MIDDLE, LAST), by_key[key], strict=True):
                    seconds[stage, kind, microbatch] = figure  # type: ignore[index]
    return seconds


def _seconds(
    cost: RankCost, place: _Place, kinds: Sequence[str], num_microbatches: int
) -> tuple[float, float]:
    """Of all actions of a rank: until their computing is done, and of it computing."""
    repeats = (
        {FIRST: 1, MIDDLE: num_microbatches - 2, LAST: 1} if num_microbatches > 1 else {LAST: 1}
    )
    blocks = [
        (times, place.of(stage, kind, microbatch))
        for stage in cost.stages.values()
        for kind in kinds
        for microbatch, times in repeats.items()
    ]
    return sum(times * block.self_s for times, block in blocks), sum(
        times * block.busy_s for times, block in blocks
    )


def _peaks_before_backward(cost: RankCost, place: _Place) -> Iterator[float]:
    """The most bytes that a rank has held until then, up to the end of its first backward."""
    held_bytes = peak_bytes = sum(place.start().kept.values()) + cost.batch_bytes
    yield peak_bytes
    last = max(action.microbatch for action in cost.order)
    for action in cost.order:
        block = place.of(cost.stages[action.stage], action.kind, which(action.microbatch, last + 1))
        if held_bytes + block.peak_bytes > peak_bytes:
            peak_bytes = held_bytes + block.peak_bytes
            yield peak_bytes
        held_bytes += block.kept_bytes
        if action.kind != "F":
            break


def _memory_timeline(cost: RankCost, place: _Place, ending: _Block) -> Timeline:
    """A rank's memory, action by action."""
    start = place.start()
    held_bytes = peak_bytes = sum(start.kept.values()) + cost.batch_bytes
    last, peak_position, played_blocks = max(action.microbatch for action in cost.order), -1, []
    blocks: dict[tuple[int, str, str], _Block] = {}
    for position, action in enumerate(cost.order):
        key = (action.stage, action.kind, which(action.microbatch, last + 1))
        block = blocks.get(key) or blocks.setdefault(
            key, place.of(cost.stages[action.stage], action.kind, key[2])
        )
        if held_bytes + block.peak_bytes > peak_bytes:
            peak_bytes, peak_position = held_bytes + block.peak_bytes, position
        held_bytes += block.kept_bytes
        played_blocks.append(block)
    ledger: dict[str, float] = defaultdict(float, start.kept)
    ledger["activations"] += cost.batch_bytes
    for block in played_blocks[: max(0, peak_position)]:
        for name, num_bytes in block.kept.items():
            ledger[name] += num_bytes
    if peak_position >= 0:
        for name, num_bytes in played_blocks[peak_position].at_peak.items():
            ledger[name] += num_bytes
    if held_bytes + ending.peak_bytes > peak_bytes:
        peak_bytes, ledger = held_bytes + ending.peak_bytes, defaultdict(float, start.kept)
        for block in (*played_blocks, ending):
            for name, num_bytes in (ending.at_peak if block is ending else block.kept).items():
                ledger[name] += num_bytes
    rounded = {name: round(num_bytes) for name, num_bytes in ledger.items()}
    return Timeline(0.0, {}, round(peak_bytes), rounded, rounded)
