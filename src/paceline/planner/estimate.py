"""How long a step takes under a plan and how much memory each rank needs, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.base.errors import PacelineError, PlanError
from paceline.cluster.cluster import Cluster
from paceline.cluster.limits import usable_cores
from paceline.cluster.software import PACELINE, Software
from paceline.job import Precision
from paceline.model.cost.profile import Profile
from paceline.planner.devices import devices_of
from paceline.planner.microbatches import fewest_microbatches
from paceline.planner.pieces import LazyPieces
from paceline.planner.pipelines import play_pipeline
from paceline.planner.program import start_s
from paceline.planner.rank_kinds import (
    MemoryNeed,
    Played,
    measured_rates,
    play_ranks,
    rank_kinds,
    stage_kinds,
)
from paceline.simulate.device import DeviceRates
from paceline.simulate.play import Rates
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.plan import Plan

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
    start_s: seconds that the run takes once for this plan, such as for compiling.
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

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its device's memory."""
        return all(need.missing_bytes <= 0 for need in self.needs)


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
    split: LazyPieces | None = None,
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
        PlanError: the plan's ranks don't fit the devices, microbatches=auto finds nothing that fits, or a plan splits
            the model and its pieces are not known.
    """
    profiles = [profile]
    if cluster.nodes:
        spread, rates = software.spread, None
        if plan.splits_model and not profile.is_layered:
            raise PlanError(
                f"plan '{plan}' splits the model, and what its pieces cost is not known"
            )
    else:
        rates = rates or measured_rates(cluster, waiting=plan.splits_model)
        spread = RATES_SPREAD if isinstance(rates, DeviceRates) else GPU_SPREAD
    if cluster.nodes and plan.has_schedule:
        played = play_pipeline(
            profile, plan, cluster, batch=batch, precision=precision, software=software
        )
    else:
        if rates is not None and plan.splits_model:
            kinds = stage_kinds(split, plan, cluster, batch=batch, rates=rates)
            profiles = [kind.cost.profile for kind in kinds]
        else:
            if rates is not None and plan.modifiers.microbatches == "auto":
                count = fewest_microbatches(profile, plan, cluster, batch=batch)
                plan = plan.with_(microbatches=count)
            kinds = rank_kinds(profile, plan, cluster, batch=batch, rates=rates, software=software)
        played = play_ranks(
            kinds,
            plan,
            cluster,
            precision=precision,
            snapshot=snapshot and rates is not None,
            software=software,
        )
    slowest = max((rank.timeline for rank in played), key=lambda timeline: timeline.step_s)
    fullest = max(
        (rank.timeline for rank in played), key=lambda timeline: timeline.peak_memory_bytes
    )
    step_s = slowest.step_s
    if rates is not None and plan.splits_model:
        step_s = max(step_s, _work_s(played, plan))
    needs = [rank.need for rank in played]
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
        start_s=max(start_s(each, plan) for each in profiles),
    )


def _work_s(played: Sequence[Played], plan: Plan) -> float:
    """The least that CPU ranks take together where there are fewer cores than ranks; waiting ranks need none."""
    if played[0].need.device.kind != "cpu":
        return 0.0
    busy_s = sum(
        rank.timeline.breakdown["compute"] + rank.timeline.breakdown["optimizer"] for rank in played
    )
    return busy_s * plan.world_size / len(played) / usable_cores()
