"""The kinds of ranks that a plan has on a cluster, and the step that each of them takes.

Ranks that do the same on devices that are alike are one kind, so that one of them is played. Devices may be here, with
rates that were measured, or described, with rates that are stated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from paceline.planner.program import step_program
from paceline.simulate.accelerator import AcceleratorRates
from paceline.simulate.device import OLD_S, DeviceRates, measure_device
from paceline.simulate.play import Rates, Timeline, play
from paceline.strategies.costs import allocator_of
from paceline.strategies.plan import Plan

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
    """What one kind of rank took for its step. timeline: as a run measures its memory."""

    name: str
    device: Device
    timeline: Timeline

    @classmethod
    def of(cls, name: str, device: Device, plan: Plan, tensors: Timeline) -> Played:
        """tensors: what the rank's program gave."""
        return cls(name, device, allocator_of(plan, device).resident(tensors))

    def need(self, plan: Plan, software: Software = PACELINE) -> MemoryNeed:
        """With what the device gives away beside tensors."""
        aside = allocator_of(plan, self.device, software).set_aside(self.timeline.peak_memory_bytes)
        return MemoryNeed(self.name, self.device, {**self.timeline.ledger, **aside})


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks that do the same on devices that are alike.

    microbatches: samples of each. network: as slow as the slowest of any rank, for who takes part in a collective
        waits for all.
    """

    name: str
    device: Device
    rates: Rates
    network: Network
    microbatches: tuple[float, ...]

    def play(
        self,
        profile: Profile,
        plan: Plan,
        *,
        precision: Precision,
        snapshot: bool = False,
        software: Software = PACELINE,
    ) -> Played:
        """The step of a model that is not cut into stages. Micro-batches between the first two and the last are alike
        and are played once."""
        sizes = self.microbatches

        def played(sizes: Sequence[float]) -> Timeline:
            program = step_program(
                profile, plan, self.device.kind, sizes, snapshot=snapshot, software=software
            )
            return play(program, self.rates, self.network, precision=precision)

        if len(sizes) <= 3:
            tensors = played(sizes)
        else:
            middle = sum(sizes[1:-1]) / (len(sizes) - 2)
            tensors = _repeated(
                played((sizes[0], sizes[-1])), played((sizes[0], middle, sizes[-1])), len(sizes) - 2
            )
        return Played.of(self.name, self.device, plan, tensors)


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
    plan: Plan, cluster: Cluster, *, batch: int, rates: Rates | None, software: Software = PACELINE
) -> list[RankKind]:
    """The kinds of ranks of a plan that does not cut the model into stages. rates: see `measured_rates`; None for
    devices that are described.

    Raises:
        PlanError: the plan's ranks don't fit the devices.
    """
    if rates is None:
        sizes = (samples_of(plan, cluster, batch),) * plan.num_microbatches
        span = cluster.span(0, plan.num_workers)
        network = software.on(slowest(span))
        return [
            RankKind(device.name, device, stated_rates(device, software), network, sizes)
            for device in dict.fromkeys(device for device, _ in span)
        ]
    parts = split(batch, split_shares(plan, cluster))  # replicas are numbered as ranks are
    kinds = {
        (device if device.taken else replace(device, index=0), len(part))
        for device, part in zip(devices_of(plan, cluster)[-plan.replicas :], parts, strict=True)
    }
    network = PACELINE.on(Network(cluster.link_of_all))
    # A rank without samples of its own runs one that doesn't count.
    return [
        RankKind(
            f"{samples} samples" if len(kinds) > 1 else "each rank",
            device,
            rates_of(device, rates),
            network,
            tuple(max(1.0, len(part)) for part in split(samples, (1,) * plan.num_microbatches)),
        )
        for device, samples in sorted(kinds, key=lambda kind: (-kind[1], kind[0].memory_bytes))
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
        software.formats.activation,
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
        software.formats.activation,
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
