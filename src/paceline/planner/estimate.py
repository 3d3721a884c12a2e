"""How long a step takes under a plan and how much memory each rank needs, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.base.errors import PacelineError, PlanError
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.cluster.limits import usable_cores
from paceline.cluster.software import PACELINE, Software
from paceline.job import Precision
from paceline.model.cost.profile import Profile
from paceline.planner.accumulate import fewest_microbatches
from paceline.planner.break_even import Gain
from paceline.planner.devices import devices_of
from paceline.planner.pipelines import play_pipeline
from paceline.planner.program import stage_program, start_s
from paceline.planner.rank_kinds import (
    MemoryNeed,
    Played,
    measured_rates,
    rank_kinds,
    rates_of,
)
from paceline.simulate.device import DeviceRates
from paceline.simulate.play import Rates, play_together
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.mesh import Mesh, weakest
from paceline.strategies.plan import Plan
from paceline.strategies.stages.cost import RankCost

# Half the width of an 80 % interval around a step that is predicted from this machine's rates alone, as a natural
# logarithm. Fitted on `benchmarks.regret`; see docs/formulas.md.
RATES_SPREAD = 1.05
# The same on GPUs of this machine: five of six steps on an H200 lie within it; see docs/formulas.md.
GPU_SPREAD = 0.35


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


class SplitPrices(Protocol):
    """A job's model in pieces; see `strategies.stages.price`."""

    def ranks(
        self, plan: Plan, devices: Sequence[Device], *, microbatch_samples: int
    ) -> Sequence[RankCost]: ...


class NotPriced(PacelineError):
    """A plan that can run and whose cost nobody knows."""


def estimate(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    *,
    batch: int,
    precision: Precision = "float32",
    rates: Rates | None = None,
    split: SplitPrices | None = None,
    snapshot: bool = True,
    software: Software = PACELINE,
) -> Estimate:
    """Play the plan's step on the cluster.

    Args:
        batch: Samples an optimizer step, over all devices.
        rates: Of a device that doesn't state its own; by default measured on this machine (0.3 s, then cached).
        split: The model in pieces, for plans that split it.
        snapshot: Whether checkpoints are written while training goes on, from a copy of the state.
        software: The program that trains, on a cluster that is described.

    Raises:
        PlanError: the plan's ranks don't fit the devices, accumulate=auto finds nothing that fits, or a plan splits
            the model and its pieces are not known.
    """
    step_s, run_start_s = 0.0, start_s(profile, plan)
    if cluster.nodes and (profile.by_dimensions or not plan.splits_model):
        spread, rates = software.spread, None
    else:
        rates = rates or measured_rates(cluster, waiting=plan.splits_model)
        spread = RATES_SPREAD if isinstance(rates, DeviceRates) else GPU_SPREAD
    if rates is None and plan.has_schedule:
        step_s, played = play_pipeline(
            profile, plan, cluster, batch=batch, precision=precision, software=software
        )
    elif rates is not None and plan.splits_model:
        costs, places = _split(plan, cluster, split, batch=batch)
        played = _play_split(
            costs, places, plan, cluster, rates, precision=precision, snapshot=snapshot
        )
        step_s, run_start_s = (
            _work_s(played, plan),
            max(start_s(cost.profile, plan) for cost in costs),
        )
    else:
        if rates is not None and plan.modifiers.accumulate == "auto":
            plan = plan.with_(
                accumulate=fewest_microbatches(
                    profile, plan, cluster, batch=batch, precision=precision
                )
            )
        kinds = rank_kinds(plan, cluster, batch=batch, rates=rates, software=software)
        played = [
            kind.play(
                profile,
                plan,
                precision=precision,
                software=software,
                snapshot=snapshot and rates is not None,
            )
            for kind in kinds
        ]
    slowest = max((rank.timeline for rank in played), key=lambda timeline: timeline.step_s)
    fullest = max(
        (rank.timeline for rank in played), key=lambda timeline: timeline.peak_memory_bytes
    )
    step_s = max(slowest.step_s, step_s)
    needs = [rank.need(plan, software) for rank in played]
    if rates is not None:
        needs += [
            MemoryNeed(name, devices_of(plan, cluster)[0], dict(ledger))
            for cost in ActivePlan(plan).costs
            for name, ledger in cost.ranks_apart(profile, plan).items()
        ]
    return Estimate(
        step_s,
        fullest.peak_memory_bytes,
        fullest.ledger,
        slowest.breakdown,
        profile.notes,
        tuple(needs),
        low_s=step_s / math.exp(spread),
        high_s=step_s * math.exp(spread),
        start_s=run_start_s,
    )


def _split(
    plan: Plan, cluster: Cluster, split: SplitPrices | None, *, batch: int
) -> tuple[Sequence[RankCost], list[Device]]:
    """What each rank of one replica costs, and its device; replicas are alike."""
    if split is None:
        raise PlanError(f"plan '{plan}' splits the model, and what its pieces cost is not known")
    devices = devices_of(plan, cluster)
    samples = max(1, -(-batch // (plan.replicas * plan.num_microbatches)))
    try:
        costs = split.ranks(plan, devices, microbatch_samples=samples)
    except PlanError:  # no cut fits: the best one without limits says by how much
        costs = split.ranks(plan, (), microbatch_samples=samples)
    return costs, [device for device in weakest(plan, devices) if device is not None]


def _play_split(
    costs: Sequence[RankCost],
    places: Sequence[Device],
    plan: Plan,
    cluster: Cluster,
    rates: Rates,
    *,
    precision: Precision,
    snapshot: bool,
) -> list[Played]:
    """The step of ranks that wait for each other's messages."""
    programs = [
        stage_program(cost, plan, device.kind, snapshot=snapshot)
        for cost, device in zip(costs, places, strict=True)
    ]
    timelines = play_together(
        programs,
        [rates_of(device, rates) for device in places],
        cluster.link_of_all,
        precision=precision,
    )
    word = Mesh.of(plan, 0).stage_word
    return [
        Played.of(f"{word} {place}" if len(places) > 1 else "each rank", device, plan, timeline)
        for place, (device, timeline) in enumerate(zip(places, timelines, strict=True))
    ]


def _work_s(played: Sequence[Played], plan: Plan) -> float:
    """The least that CPU ranks take together where there are fewer cores than ranks; waiting ranks need none."""
    if played[0].device.kind != "cpu":
        return 0.0
    busy_s = sum(
        rank.timeline.breakdown["compute"] + rank.timeline.breakdown["optimizer"] for rank in played
    )
    return busy_s * plan.world_size / len(played) / usable_cores()
