"""How long a step takes under a plan and how much memory each rank needs, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.cluster import Cluster, Device, Network, usable_cores
from paceline.errors import PacelineError, PlanError
from paceline.job import Precision
from paceline.planner.analytic import least_bytes, play_described
from paceline.planner.gain import Gain
from paceline.planner.program import HOLES_ADDED, stage_program, start_s, step_program
from paceline.plans import Plan
from paceline.profile.device import DeviceRates, measure_device
from paceline.profile.operators import operator_times
from paceline.profile.profile import Profile
from paceline.runtime.order import split
from paceline.simulate.play import Timeline, play, play_together
from paceline.simulate.program import Compute, Program, Repeat
from paceline.software import PACELINE, Software
from paceline.strategies.costs import CPU_RUNTIME_BYTES, beside_tensors
from paceline.strategies.mesh import Mesh, weakest
from paceline.strategies.registry import active
from paceline.strategies.stages.cost import RankCost

# Holes in the C library's heap, as a part of the most bytes of activations, which come and go in many sizes.
# Measured with glibc 2.36; see docs/memory.md.
CPU_HOLES = 0.4
CPU_HOLES_LEAN = 0.1  # of a rank with a memory limit, whose large tensors have pages of their own
ROUNDED_BYTES = 16  # a ledger's entries are whole bytes, and may be less than their sum before
# Half the width of an 80 % interval around a step that is predicted from this machine's rates alone, as a natural
# logarithm. Fitted on `benchmarks.regret`; see docs/formulas.md.
RATES_SPREAD = 1.05
# The same where the job's own operators were timed one by one.
TIMED_SPREAD = 0.4
# Rates that only stand in where nothing but memory is asked for.
ANY_RATES = DeviceRates(1e9, 1e9, 1e9, 1e9, 0.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a plan is expected to cost.

    step_s: seconds an optimizer step, of the slowest rank, without reading data, evaluating and saving.
    peak_memory_bytes: of the rank that needs most: on a CPU, its resident size above that of a started, empty
        rank; on a GPU, what torch's allocator hands out.
    ledger: that rank's bytes at its peak by what they are for: parameters, gradients, optimizer, activations,
        communication, checkpoint; on a CPU also runtime (libraries) and holes (in the heap).
    breakdown: the slowest rank's seconds: compute, communication (what no computing hides), optimizer.
    notes: which figures are rough, and why.
    needs: of every kind of rank, what its device must hold.
    start_s: seconds that the run takes once for this plan, such as for compiling. gain: by which what takes them
        makes a step shorter, where that is known.
    low_s, high_s: between them the step is 80 times in 100.
    is_measured: whether steps were really taken.
    """

    step_s: float
    peak_memory_bytes: int
    ledger: Mapping[str, int]
    breakdown: Mapping[str, float]
    notes: tuple[str, ...] = ()
    needs: tuple[MemoryNeed, ...] = ()
    low_s: float = math.nan
    high_s: float = math.nan
    is_measured: bool = False
    start_s: float = 0.0
    gain: Gain | None = None

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its device's memory."""
        return all(need.missing_bytes <= 0 for need in self.needs)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a rank needs at its peak, by what it is for, and the device that has to hold it."""

    name: str
    device: Device
    ledger: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.ledger.values())

    @property
    def missing_bytes(self) -> int:
        return self.total_bytes - self.device.memory_bytes


def _need(name: str, device: Device, plan: Plan, timeline: Timeline) -> MemoryNeed:
    """What a rank needs of a device that is here: its tensors, and on a GPU what comes beside them."""
    return MemoryNeed(name, device, {**timeline.ledger, **beside_tensors(plan, device, timeline.peak_memory_bytes)})


class SplitPrices(Protocol):
    """A job's model in pieces; see `strategies.stages.price`."""

    def ranks(self, plan: Plan, devices: Sequence[Device], *, microbatch_samples: int) -> Sequence[RankCost]: ...


class NotPriced(PacelineError):
    """A plan that can run and whose cost nobody knows."""


def estimate(profile: Profile, plan: Plan, cluster: Cluster, *, batch: int, precision: Precision = "float32",
             rates: DeviceRates | None = None, split: SplitPrices | None = None, snapshot: bool = True,
             software: Software = PACELINE, times_operators: bool = True) -> Estimate:
    """Play the plan's step on the cluster.

    Args:
        batch: Samples an optimizer step, over all devices.
        rates: Of a device that doesn't state its own; by default measured on this machine (0.3 s, then cached).
        split: The model in pieces, for plans that split it.
        snapshot: Whether checkpoints are written while training goes on, from a copy of the state.
        software: The program that trains, on a cluster that is described.
        times_operators: Whether operators that this machine's CPU has not timed yet are timed: a second or two for each
            number of samples and of ranks. Not while ranks are at work.

    Raises:
        PlanError: the plan's ranks don't fit the devices, accumulate=auto finds nothing that fits, or a plan splits
            the model and its pieces are not known.
    """
    if cluster.nodes and (profile.by_dimensions or not plan.splits_model):
        return _estimate_described(profile, plan, cluster, batch=batch, precision=precision, software=software)
    rates = rates or _measured(cluster, waiting=plan.splits_model, times_operators=times_operators)
    if plan.splits_model:
        return _estimate_split(profile, plan, cluster, batch=batch, precision=precision, rates=rates, split=split,
                               snapshot=snapshot)
    if plan.modifiers.accumulate == "auto":
        plan = plan.with_(accumulate=fewest_microbatches(profile, plan, cluster, batch=batch, precision=precision))
    ranks = _ranks(plan, cluster, batch=batch, rates=rates)
    played = {rank: _play(profile, plan, cluster, rank, precision=precision, snapshot=snapshot) for rank in ranks}
    slowest = max(played.values(), key=lambda timeline: timeline.step_s)
    fullest = max(played.values(), key=lambda timeline: timeline.peak_memory_bytes)
    needs = tuple(_need(f"{rank.samples} samples" if len(played) > 1 else "each rank", rank.device, plan, timeline)
                  for rank, timeline in played.items())
    needs += tuple(MemoryNeed(name, devices_of(plan, cluster)[0], dict(ledger)) for strategy in active(plan)
                   for name, ledger in strategy.ranks_apart(profile, plan).items())
    return _sure(Estimate(slowest.step_s, fullest.peak_memory_bytes, fullest.ledger, slowest.breakdown, profile.notes,
                          needs, start_s=start_s(profile, plan)), _spread(profile, ranks[0].rates))


def _estimate_described(profile: Profile, plan: Plan, cluster: Cluster, *, batch: int, precision: Precision,
                        software: Software) -> Estimate:
    """On devices that need not be here. A rank needs what its tensors take of the device, and what the device needs to
    run anything."""
    step_s, played = play_described(profile, plan, cluster, batch=batch, precision=precision, software=software)
    slowest = max(played, key=lambda one: one.timeline.step_s).timeline
    fullest = max(played, key=lambda one: one.timeline.peak_memory_bytes).timeline
    needs = tuple(MemoryNeed(one.name, one.device, {**one.timeline.ledger, **_beside(
        one.timeline.peak_memory_bytes, software)}) for one in played)
    return _sure(Estimate(step_s, fullest.peak_memory_bytes, fullest.ledger, slowest.breakdown, profile.notes, needs),
                 software.spread)


def _sure(found: Estimate, spread: float) -> Estimate:
    """With its interval. spread: half its width, as a natural logarithm."""
    return replace(found, low_s=found.step_s / math.exp(spread), high_s=found.step_s * math.exp(spread))


def _beside(peak_bytes: int, software: Software) -> dict[str, int]:
    """What a device gives away beside tensors."""
    return {"reserve": round((software.reserved - 1) * peak_bytes), "context": round(software.context_bytes)}


def least_missing_bytes(profile: Profile, plan: Plan, cluster: Cluster, *, batch: int, precision: Precision,
                        software: Software = PACELINE, enough_bytes: float = math.inf) -> int:
    """By how much a plan is over its devices' memory at least; 0 where that is not known at a glance.

    enough_bytes: above 0, and this much, it may be more: nobody looks further.

    Raises:
        PlanError: as `estimate`.
    """
    if not cluster.nodes or not profile.by_dimensions:
        return 0
    missing_bytes = 0
    for peak_bytes, device in least_bytes(profile, plan, cluster, batch=batch, precision=precision, software=software):
        missing_bytes = max(missing_bytes, int(peak_bytes) - ROUNDED_BYTES
                            + sum(_beside(int(peak_bytes), software).values()) - device.memory_bytes)
        if missing_bytes > 0 and missing_bytes >= enough_bytes:
            break
    return missing_bytes


def _estimate_split(profile: Profile, plan: Plan, cluster: Cluster, *, batch: int, precision: Precision,
                    rates: DeviceRates, split: SplitPrices | None, snapshot: bool) -> Estimate:
    """Play one replica's ranks together; replicas are alike."""
    if split is None:
        raise PlanError(f"plan '{plan}' splits the model, and what its pieces cost is not known")
    devices = devices_of(plan, cluster)
    samples = max(1, -(-batch // (plan.replicas * plan.num_microbatches)))
    try:
        ranks = split.ranks(plan, devices, microbatch_samples=samples)
    except PlanError:  # no cut fits: the best one without limits says by how much
        ranks = split.ranks(plan, (), microbatch_samples=samples)
    places = [device for device in weakest(plan, devices) if device is not None]
    programs = [stage_program(rank, plan, device.kind, snapshot=snapshot)
                for rank, device in zip(ranks, places, strict=True)]
    _time_operators(programs, rates)
    played = play_together(programs, [_rates_of(device, rates) for device in places], cluster.link_of_all,
                           precision=precision)
    played = [_resident(timeline, device) if device.kind == "cpu" else timeline
              for timeline, device in zip(played, places, strict=True)]
    slowest = max(played, key=lambda timeline: timeline.step_s)
    fullest = max(played, key=lambda timeline: timeline.peak_memory_bytes)
    word = Mesh.of(plan, 0).stage_word
    needs = tuple(_need(f"{word} {place}" if len(played) > 1 else "each rank", device, plan, timeline)
                  for place, (device, timeline) in enumerate(zip(places, played, strict=True)))
    step_s = max(slowest.step_s, _work_s(played, plan, places))
    return _sure(Estimate(step_s, fullest.peak_memory_bytes, fullest.ledger, slowest.breakdown, profile.notes,
                          needs, start_s=max(start_s(rank.profile, plan) for rank in ranks)), _spread(profile, rates))


def _work_s(played: Sequence[Timeline], plan: Plan, places: Sequence[Device]) -> float:
    """The least that CPU ranks take together where there are fewer cores than ranks; waiting ranks need none."""
    if places[0].kind != "cpu":
        return 0.0
    busy_s = sum(timeline.breakdown["compute"] + timeline.breakdown["optimizer"] for timeline in played)
    return busy_s * plan.world_size / len(played) / usable_cores()


def fewest_microbatches(profile: Profile, plan: Plan, cluster: Cluster, *, batch: int,
                        precision: Precision = "float32") -> int:
    """The fewest micro-batches an update with which every rank stays within its device's memory.

    Raises:
        PlanError: one sample a micro-batch is too much for some device; says by how much, for what, and which
            plan on the same devices would fit.
    """
    ranks = _ranks(plan, cluster, batch=batch, rates=ANY_RATES)
    most = max(rank.samples for rank in ranks)

    def shortfall(count: int) -> tuple[int, _Rank, Timeline]:
        """By how many bytes the worst rank is over with so many micro-batches (negative: it fits)."""
        tried = plan.with_(accumulate=count)
        return max(((_need("", rank.device, tried, timeline).missing_bytes, rank, timeline) for rank, timeline in
                    ((rank, _play(profile, tried, cluster, rank, precision=precision)) for rank in ranks)),
                   key=lambda found: found[0])

    # One alone needs no second gradient beside the first; from two on the need only falls, so the interval is halved.
    at_once, at_most = shortfall(1), shortfall(most)
    if at_once[0] <= 0:
        return 1
    if at_most[0] > 0:
        missing_bytes, worst, timeline = min(at_once, at_most, key=lambda found: found[0])
        raise _too_large(plan, worst, timeline, missing_bytes,
                         others=_plans_that_fit(profile, plan, cluster, batch=batch, precision=precision))
    fewest = 2
    while fewest < most:
        middle = (fewest + most) // 2
        fewest, most = (fewest, middle) if shortfall(middle)[0] <= 0 else (middle + 1, most)
    return fewest


def split_shares(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """The weight of each replica in the global batch.

    Replicas by speed or memory get weights in proportion to it. Devices count as equally fast unless all of them
    state their speed.
    """
    shares = plan.modifiers.shares
    if isinstance(shares, tuple):
        return shares
    devices = devices_of(plan, cluster)
    if shares == "memory":
        return _whole_weights([device.memory_bytes for device in devices])
    if shares == "speed":
        speeds = [device.flops_per_s for device in devices if device.flops_per_s]
        if len(speeds) == len(devices):
            return _whole_weights(speeds)
    return (1,) * plan.replicas


def _whole_weights(figures: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers that are in the figures' proportion to one per cent (to 1 in 1000 at the least).

    >>> _whole_weights([3e9, 1e9])
    (3, 1)
    """
    weights = [1] * len(figures)
    for largest in range(1, 1001):
        wanted = [largest * figure / max(figures) for figure in figures]
        weights = [max(1, round(weight)) for weight in wanted]
        if all(abs(weight - exact) <= 0.01 * exact for weight, exact in zip(weights, wanted, strict=True)):
            break
    return tuple(weights)


@dataclass(frozen=True, slots=True)
class _Rank:
    """A kind of rank: what it runs on, how fast that is, and its samples of the global batch."""

    device: Device
    rates: DeviceRates
    samples: int


def _ranks(plan: Plan, cluster: Cluster, *, batch: int, rates: DeviceRates) -> list[_Rank]:
    """The different kinds of ranks; replicas are numbered as ranks are."""
    parts = split(batch, split_shares(plan, cluster))
    kinds = {_Rank(device if device.taken else replace(device, index=0), _rates_of(device, rates), len(part))
             for device, part in zip(devices_of(plan, cluster)[-plan.replicas:], parts, strict=True)}
    return sorted(kinds, key=lambda rank: (-rank.samples, rank.device.memory_bytes))


def _rates_of(device: Device, rates: DeviceRates) -> DeviceRates:
    """What the device states of itself, and what is known of its like."""
    faster = device.flops_per_s / rates.flops_per_s if device.flops_per_s else 1.0
    return replace(rates, flops_per_s=rates.flops_per_s * faster, bf16_flops_per_s=rates.bf16_flops_per_s * faster,
                   memory_bytes_per_s=device.memory_bytes_per_s or rates.memory_bytes_per_s)


def _measured(cluster: Cluster, *, waiting: bool, times_operators: bool) -> DeviceRates:
    """This machine's rates for one of its ranks. Ranks share the cores evenly; more ranks than cores take turns.

    waiting: ranks wait for each other, so that who works has a core.
    """
    num_ranks, num_cores = len(cluster.devices), usable_cores()
    kind = cluster.devices[-1].kind  # of the ranks that run the model: servers come first
    rates = measure_device(kind, max(1, num_cores // num_ranks))
    if kind != "cpu":
        return rates
    timed = operator_times(num_ranks, measures=times_operators)
    rates = replace(rates, timed=timed, memory_bytes_per_s=timed.memory_bytes_per_s or rates.memory_bytes_per_s,
                    new_page_s=timed.new_page_s)
    turns = 1.0 if waiting else max(1.0, num_ranks / num_cores)
    return replace(rates.slowed(turns), turns=turns)


def _time_operators(programs: Iterable[Program], rates: DeviceRates) -> None:
    """Those of steps that the device has not timed yet."""
    if rates.timed is not None:
        rates.timed.measure(call for program in programs for event in _computed(program) for call, _ in event.calls)


def _spread(profile: Profile, rates: DeviceRates) -> float:
    """Half the width of the interval around a step of such work."""
    is_timed = (rates.timed is not None and rates.timed.measures
                and all(one.forward.calls.first for one in profile.segments if one.forward.operators))
    return TIMED_SPREAD if is_timed else RATES_SPREAD


def _computed(program: Program) -> Iterator[Compute]:
    for event in program:
        if isinstance(event, Compute):
            yield event
        elif isinstance(event, Repeat):
            yield from _computed(event.events)


def _play(profile: Profile, plan: Plan, cluster: Cluster, rank: _Rank, *, precision: Precision,
          snapshot: bool = True) -> Timeline:
    """A rank's step. Micro-batches between the first two and the last are alike and are played once."""
    # A rank without samples of its own runs one that doesn't count.
    sizes = [max(1.0, len(part)) for part in split(rank.samples, (1,) * plan.num_microbatches)]
    network = PACELINE.on(Network(cluster.link_of_all))

    def played(sizes: Sequence[float]) -> Timeline:
        program = step_program(profile, plan, rank.device.kind, sizes, snapshot=snapshot)
        _time_operators([program], rank.rates)
        return play(program, rank.rates, network, precision=precision)

    if len(sizes) <= 3:
        found = played(sizes)
    else:
        middle = sum(sizes[1:-1]) / (len(sizes) - 2)
        found = _repeated(played([sizes[0], sizes[-1]]), played([sizes[0], middle, sizes[-1]]), len(sizes) - 2)
    return _resident(found, rank.device) if rank.device.kind == "cpu" else found


def _resident(timeline: Timeline, device: Device) -> Timeline:
    """What a process holds for the tensors of a timeline. One with a limit keeps no heap, and few holes."""
    ledger = dict(timeline.ledger)
    ledger["runtime"] = ledger.get("runtime", 0) + CPU_RUNTIME_BYTES
    added = ledger.pop(HOLES_ADDED, 0)
    ledger["holes"] = (ledger.get("holes", 0) + (0 if device.is_limit else added)
                       + round((CPU_HOLES_LEAN if device.is_limit else CPU_HOLES)
                               * timeline.highest.get("activations", 0)))
    return replace(timeline, peak_memory_bytes=sum(ledger.values()), ledger=ledger)


def _repeated(without: Timeline, once: Timeline, times: int) -> Timeline:
    """A timeline with the part that `once` has and `without` has not, so many times over. Memory stays."""
    def many(base: float, more: float) -> float:
        return base + times * (more - base)

    return replace(once, step_s=many(without.step_s, once.step_s), breakdown={
        part: many(without.breakdown[part], seconds) for part, seconds in once.breakdown.items()})


def devices_of(plan: Plan, cluster: Cluster) -> tuple[Device, ...]:
    """The device of every rank. A cluster that lists the devices of one host stands for as many like it as needed;
    CPUs beside GPUs, which are for servers, are on the first."""
    hosts, rest = divmod(plan.world_size, len(cluster.devices))
    if rest and hosts:
        raise PlanError(f"plan '{plan}' needs {plan.world_size} devices and there are {len(cluster.devices)} a host",
                        hint=f"a plan of {len(cluster.devices)} ranks, or of a multiple of it on several hosts")
    others = tuple(device for device in cluster.devices if device.kind == cluster.devices[-1].kind)
    return (*cluster.devices, *(others * hosts))[:plan.world_size]


def _plans_that_fit(profile: Profile, plan: Plan, cluster: Cluster, *, batch: int,
                    precision: Precision) -> list[Plan]:
    """Plans on the same devices that hold less, from the smallest change to the largest, where they fit."""
    smaller = [plan.with_(recompute="full")]
    if plan.world_size > 1:
        smaller.append(Plan.of(shard=plan.world_size))
        smaller.append(Plan.of(shard=plan.world_size, recompute="full"))
    return [tried.with_(accumulate="auto") for tried in smaller
            if tried.with_(accumulate=1) != plan.with_(accumulate=1)
            and _fits(profile, tried, cluster, batch=batch, precision=precision)]


def _fits(profile: Profile, plan: Plan, cluster: Cluster, *, batch: int, precision: Precision) -> bool:
    """Whether some number of micro-batches fits every rank's memory."""
    ranks = _ranks(plan, cluster, batch=batch, rates=ANY_RATES)
    def missing_bytes(tried: Plan, rank: _Rank) -> int:
        return _need("", rank.device, tried, _play(profile, tried, cluster, rank, precision=precision)).missing_bytes

    return any(all(missing_bytes(plan.with_(accumulate=count), rank) <= 0 for rank in ranks)
               for count in (1, max(rank.samples for rank in ranks)))


def _too_large(plan: Plan, rank: _Rank, timeline: Timeline, missing_bytes: int, *,
               others: Sequence[Plan]) -> PlanError:
    need = _need("", rank.device, plan, timeline)
    by_size = sorted(need.ledger.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {_gib(held)}" for name, held in by_size if held)
    taken = f"; {rank.device.taken}" if rank.device.taken else ""
    return PlanError(
        f"plan '{plan}' needs {_gib(need.total_bytes)} on a rank however small its micro-batches are, and "
        f"a {rank.device.kind} device has {_gib(rank.device.memory_bytes)}: {_gib(missing_bytes)} "
        f"({missing_bytes} bytes) too little ({parts}){taken}",
        hint=f"on these devices '{others[0]}' fits" if others
        else "more devices to shard over, devices with more memory, or a smaller model")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
