"""The kinds of ranks that a plan has on a cluster, and the step that each of them takes.

Ranks that do the same on devices that are alike are one kind, so that one of them is played. Devices may be here, with
rates that were measured, or described, with rates that are stated. A rank has the whole model or stages of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from paceline.base.errors import PlanError
from paceline.cluster.accelerators import gpus
from paceline.cluster.catalogue import Accelerator, named_by_driver
from paceline.cluster.cluster import Cluster, threads_of_a_rank
from paceline.cluster.devices import Device
from paceline.cluster.limits import usable_cores
from paceline.cluster.links import Network
from paceline.cluster.software import PACELINE, Software
from paceline.job import Precision
from paceline.job.order import split
from paceline.launch.process.malloc import GIVEN_BACK_BLOCK_BYTES, KEPT_BLOCK_BYTES
from paceline.model.cost.profile import Profile
from paceline.planner.devices import devices_of
from paceline.planner.pieces import LazyPieces
from paceline.planner.program import rank_program
from paceline.simulate.accelerator import AcceleratorRates
from paceline.simulate.device import OLD_S, DeviceRates, measure_device
from paceline.simulate.play import Rates, Timeline, play_together
from paceline.strategies.costs import allocator_of
from paceline.strategies.mesh import Mesh, weakest
from paceline.strategies.plan import Plan
from paceline.strategies.stages.cost import RankCost, whole_rank

# The rate of fused attention by that of the best matrix product, of a GPU that is not listed: as of an H100 (Dao 2023,
# FlashAttention-2: 335 TFLOP/s; ml-engineering: a product reaches 794).
ATTENTION_PART = 0.42


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


@dataclass(frozen=True, slots=True)
class Played:
    """What one kind of rank took for its step. timeline: as a run measures its memory. need: with what the device gives
    away beside tensors."""

    timeline: Timeline
    need: MemoryNeed

    @classmethod
    def of(
        cls, name: str, device: Device, plan: Plan, tensors: Timeline, software: Software
    ) -> Played:
        """tensors: what the rank's program gave."""
        allocator = allocator_of(plan, device, software)
        timeline = allocator.resident(tensors)
        aside = allocator.set_aside(timeline.peak_memory_bytes)
        return cls(timeline, MemoryNeed(name, device, {**timeline.ledger, **aside}))


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks that do the same on devices that are alike."""

    name: str
    device: Device
    rates: Rates
    cost: RankCost


def play_ranks(
    kinds: Sequence[RankKind],
    plan: Plan,
    cluster: Cluster,
    *,
    precision: Precision = "float32",
    snapshot: bool = False,
    software: Software = PACELINE,
) -> list[Played]:
    """The step of ranks that wait for each other's messages, or of one of each kind if no rank waits for others. Then
    micro-batches between the first two and the last are alike, and are played once.
    """
    span = cluster.span(0, plan.num_workers) if cluster.nodes else ()
    network = software.on(slowest(span) if span else Network(cluster.link_of_all))

    def timelines(costs: Iterable[RankCost]) -> list[Timeline]:
        programs = [
            rank_program(cost, plan, kind.device.kind, snapshot=snapshot, software=software)
            for kind, cost in zip(kinds, costs, strict=True)
        ]
        rates = [kind.rates for kind in kinds]
        return play_together(programs, rates, network, precision=precision)

    costs = [kind.cost for kind in kinds]
    between = len(costs[0].samples) - 2
    if between < 2 or not costs[0].is_whole:
        tensors = timelines(costs)
    else:
        without = timelines(_fewer(cost) for cost in costs)
        once = timelines(_fewer(cost, sum(cost.samples[1:-1]) / between) for cost in costs)
        tensors = [_repeated(*pair, between) for pair in zip(without, once, strict=True)]
    return [
        Played.of(kind.name, kind.device, plan, timeline, software)
        for kind, timeline in zip(kinds, tensors, strict=True)
    ]


def _fewer(cost: RankCost, *between: float) -> RankCost:
    """The cost of the first and the last micro-batch, with what is between them."""
    return whole_rank(cost.profile, (cost.samples[0], *between, cost.samples[-1]))


def _repeated(without: Timeline, once: Timeline, times: int) -> Timeline:
    """A timeline with the part that `once` has and `without` has not, so many times over. Memory stays."""

    def many(base: float, more: float) -> float:
        return base + times * (more - base)

    return replace(
        once,
        step_s=many(without.step_s, once.step_s),
        breakdown={
            part: many(without.breakdown[part], seconds) for part, seconds in once.breakdown.items()
        },
    )


def rank_kinds(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    *,
    batch: int,
    rates: Rates | None,
    software: Software = PACELINE,
) -> list[RankKind]:
    """The kinds of ranks of a plan that does not cut the model into stages. rates: see `measured_rates`; None for
    devices that are described.

    Raises:
        PlanError: the plan's ranks don't fit the devices.
    """
    if rates is None:
        sizes = (samples_of(plan, cluster, batch),) * plan.num_microbatches
        return [
            RankKind(
                device.name, device, stated_rates(device, software), whole_rank(profile, sizes)
            )
            for device in dict.fromkeys(device for device, _ in cluster.span(0, plan.num_workers))
        ]
    parts = split(batch, split_shares(plan, cluster))  # replicas are numbered as ranks are
    kinds = {
        (device if device.taken else replace(device, index=0), len(part))
        for device, part in zip(devices_of(plan, cluster)[-plan.replicas :], parts, strict=True)
    }
    counts = (1,) * plan.num_microbatches
    # A rank without samples of its own runs one that doesn't count.
    return [
        RankKind(
            f"{samples} samples" if len(kinds) > 1 else "each rank",
            device,
            rates_of(device, rates),
            whole_rank(profile, tuple(max(1.0, len(part)) for part in split(samples, counts))),
        )
        for device, samples in sorted(kinds, key=lambda kind: (-kind[1], kind[0].memory_bytes))
    ]


def stage_kinds(
    pieces: LazyPieces | None, plan: Plan, cluster: Cluster, *, batch: int, rates: Rates
) -> list[RankKind]:
    """The ranks of one replica of a split model on devices that are here; replicas are alike.

    Raises:
        PlanError: the plan's ranks don't fit the devices, or what the model's pieces cost is not known.
    """
    if pieces is None:
        raise PlanError(f"plan '{plan}' splits the model, and what its pieces cost is not known")
    devices = devices_of(plan, cluster)
    samples = max(1, -(-batch // (plan.replicas * plan.num_microbatches)))
    try:
        costs = pieces.ranks(plan, devices, microbatch_samples=samples)
    except PlanError:  # no cut fits: the best one without limits says by how much
        costs = pieces.ranks(plan, (), microbatch_samples=samples)
    word = Mesh.of(plan, 0).stage_word
    return [
        RankKind(
            f"{word} {place}" if len(costs) > 1 else "each rank",
            device,
            rates_of(device, rates),
            cost,
        )
        for place, (device, cost) in enumerate(zip(weakest(plan, devices), costs, strict=True))
        if device is not None
    ]


def samples_of(plan: Plan, cluster: Cluster, batch: int) -> float:
    """Of a micro-batch, where a described cluster has devices and samples for the plan."""
    needed = plan.num_workers  # servers run on hosts
    if needed > len(cluster.devices):
        raise PlanError(
            f"plan '{plan}' needs {needed} devices and the cluster has {len(cluster.devices)}",
            hint=f"a plan of at most {len(cluster.devices)} ranks",
        )
    if batch < plan.replicas:
        raise PlanError(
            f"plan '{plan}' has {plan.replicas} replicas and a global batch has {batch} samples: some "
            "would never have any",
            hint=f"at most {batch} replicas",
        )
    return max(1.0, batch / (plan.replicas * plan.num_microbatches))


def slowest(kinds: Sequence[tuple[Device, Network]]) -> Network:
    """A network as slow as the slowest of these everywhere."""
    networks = [network for _, network in kinds]
    across = [network.across for network in networks if network.across is not None]
    return replace(
        networks[0],
        inside=min((n.inside for n in networks), key=lambda link: link.bytes_per_s),
        across=min(across, key=lambda link: link.bytes_per_s) if across else None,
        devices_per_node=min(n.devices_per_node for n in networks),
    )


def stated_rates(device: Device, software: Software) -> AcceleratorRates:
    """What a described device's accelerator does under a training program."""
    if device.accelerator is None:
        raise PlanError(f"nothing is known of device '{device.name or device}' but its name")
    return accelerator_rates(device.accelerator, software)


@lru_cache(maxsize=256)
def accelerator_rates(accelerator: Accelerator, software: Software) -> AcceleratorRates:
    """Kept, so that products that were priced once stay priced."""
    peaks = {
        precision: accelerator.product_flops_per_s(precision) for precision in get_args(Precision)
    }
    return AcceleratorRates(
        {precision: peak * accelerator.product_reached for precision, peak in peaks.items()},
        {precision: peak * accelerator.attention_reached for precision, peak in peaks.items()},
        accelerator.memory_bytes_per_s,
        accelerator.multiprocessors,
        software,
    )


def rates_of(device: Device, rates: Rates) -> Rates:
    """What the device states of itself, and what is known of its like."""
    if not isinstance(rates, DeviceRates):
        return rates
    faster = device.flops_per_s / rates.flops_per_s if device.flops_per_s else 1.0
    return replace(
        rates,
        flops_per_s=rates.flops_per_s * faster,
        bf16_flops_per_s=rates.bf16_flops_per_s * faster,
        memory_bytes_per_s=device.memory_bytes_per_s or rates.memory_bytes_per_s,
    )


def gpu_rates(gpu: Device) -> AcceleratorRates:
    """Of a GPU of this machine: as the catalogue states them, or as they are measured where it is not listed."""
    if (listed := named_by_driver(gpu.name)) is not None:
        return accelerator_rates(listed, PACELINE)
    measured = measure_device("cuda")
    peaks = {precision: measured.matrix_flops_per_s(precision) for precision in get_args(Precision)}
    software = replace(PACELINE, product_rate=1.0, memory_rate=1.0, operator_s=measured.operator_s)
    return AcceleratorRates(
        peaks,
        {precision: ATTENTION_PART * peak for precision, peak in peaks.items()},
        measured.memory_bytes_per_s,
        gpus()[gpu.index].multiprocessors,
        software,
    )


def measured_rates(cluster: Cluster, *, waiting: bool = False, oldest_s: float = OLD_S) -> Rates:
    """This machine's rates for a rank, with as many threads as it runs with; more ranks than cores take turns.

    waiting: ranks wait for each other, so that who works has a core. oldest_s: of a CPU's rates in the cache; infinite
        while ranks are at work, beside which nothing is measured well.
    """
    num_ranks, num_cores = len(cluster.devices), usable_cores()
    last = cluster.devices[-1]  # of the ranks that run the model: servers come first
    if last.kind == "cuda":
        return gpu_rates(last)
    rates = measure_device("cpu", threads_of_a_rank(num_ranks), oldest_s=oldest_s)
    keeps = not any(device.is_limit for device in cluster.devices)
    rates = replace(rates, page_block_bytes=KEPT_BLOCK_BYTES if keeps else GIVEN_BACK_BLOCK_BYTES)
    return rates.slowed(1.0 if waiting else max(1.0, num_ranks / num_cores))


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
        if all(
            abs(weight - exact) <= 0.01 * exact
            for weight, exact in zip(weights, wanted, strict=True)
        ):
            break
    return tuple(weights)
