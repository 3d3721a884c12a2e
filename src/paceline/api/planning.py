"""`plan`: find the fastest strategy that fits, how fast and how certain that is, and why the others
lose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.api.calibration import TRY_S, try_best
from paceline.api.fine_tuning import FineTuning
from paceline.api.links import with_links
from paceline.api.planning_table import Advice, Answer
from paceline.base.errors import PlanError, UsageError
from paceline.base.fork import in_a_fork
from paceline.base.imports import without_collector
from paceline.cluster.accelerators import has_gpus
from paceline.cluster.cluster import Cluster
from paceline.job import Job, Precision
from paceline.job.file import AnyJob, open_job
from paceline.planner.estimate import NotPriced
from paceline.planner.fit import reduced_memory, set_aside
from paceline.planner.goodput import outlook
from paceline.planner.problem import PlanningProblem
from paceline.planner.remedies import Attempt, Remedy, remedies
from paceline.planner.search import Candidate, RankedPlans, reason
from paceline.planner.survival import REPAIR_HOURS, FailureRates
from paceline.simulate.failures import CHECKPOINT_BYTES_PER_S

NEAREST = 3  # plans that are named if none fits
OTHER_PRECISION: Mapping[Precision, Precision] = {"float32": "bf16", "bf16": "float32"}


@dataclass(frozen=True)
class Planned:
    """A job to plan for."""

    job: Job
    # Changes of the job that need less memory on a cluster, by kind. Changes that the job's own
    # fields show are known anyway.
    smaller: Callable[[Cluster], Sequence[Sequence[Attempt]]] = lambda cluster: ()

    @classmethod
    def of(cls, job: AnyJob | FineTuning) -> Planned:
        """Return the job, and load or make it if necessary."""
        if isinstance(job, FineTuning):
            return cls(job.job(), job.smaller)
        return cls(open_job(job)[1])


def plan(
    job: AnyJob | FineTuning,
    cluster: Cluster | str = "local",
    *,
    relaxed: bool = False,
    price_per_hour: float | None = None,
    mtbf_hours: float | None = None,
    repair_hours: float = REPAIR_HOURS,
    checkpoint_bytes_per_s: float = CHECKPOINT_BYTES_PER_S,
    calibrate_s: float = TRY_S,
) -> Answer:
    """Rank the plans that a job allows on a cluster by predicted speed, or by cost.

    Args:
        job: As in `train`, or the fine-tuning of a Transformers model.
        cluster: A cluster, or a word for it: local, 2xcpu, 8xH100, 16x8xH100, 2x24GB, or a TOML file.
            On this machine plans may leave devices out.
        relaxed: Whether a relaxed plan may be chosen, which is not exact.
        price_per_hour: What a device costs per hour; plans are then ranked by what a sample costs.
            They may leave devices out.
        mtbf_hours: Mean time between failures of a device, which says how often to save. It decides
            also what each way to survive costs.
        repair_hours: Hours until a host that failed is back.
        checkpoint_bytes_per_s: Bytes of a checkpoint that a device writes per second.
        calibrate_s: Seconds for trials of the best plans on this machine's CPUs; 0 only predicts. A
            few steps of the most promising plans correct all prices. Trials of the last day count.

    Raises:
        JobError: the job makes no sense.
        ClusterError: the cluster can't be read.
        UsageError: a figure is not above 0.
        PlanError: nothing could be priced.
    """
    if price_per_hour is not None and not 0 < price_per_hour < float("inf"):
        raise UsageError(f"price_per_hour must be a number above 0, got {price_per_hour}")
    rates = (
        None
        if mtbf_hours is None
        else FailureRates(mtbf_hours, repair_hours, checkpoint_bytes_per_s)
    )
    planned = Planned.of(job)
    target = with_links(Cluster.parse(cluster) if isinstance(cluster, str) else cluster)
    named = cluster if isinstance(cluster, str) else f"{len(target.devices)} devices"

    def answer() -> Answer:
        with without_collector():
            return _answer(
                planned,
                target,
                named,
                relaxed=relaxed,
                price_per_hour=price_per_hour,
                rates=rates,
                calibrate_s=calibrate_s,
            )

    if not has_gpus():
        return answer()
    # A fork plans, so that this process's later forks can still use CUDA.
    answered: Answer = in_a_fork(answer)
    return answered


def _answer(
    planned: Planned,
    cluster: Cluster,
    named: str,
    *,
    relaxed: bool,
    price_per_hour: float | None,
    rates: FailureRates | None,
    calibrate_s: float,
) -> Answer:
    """Rank the plans and collect what there is to say about them.

    Plans are only tried on machines without GPUs, because elsewhere pricing uses CUDA in this
    process, which can then fork no ranks.
    """
    loaded = planned.job
    problem = PlanningProblem.of(loaded, price_per_hour, device=cluster.first_here)
    ranking = problem.search(cluster, may_relax=relaxed)
    if not cluster.nodes and not has_gpus():
        problem, ranking = try_best(problem, ranking, cluster, budget_s=calibrate_s)
    if ranking.chosen is None and not ranking.too_large:
        raise nothing_priced(problem, ranking, cluster)
    chosen = ranking.chosen
    notes = list(
        dict.fromkeys(
            (
                *cluster.assumptions,
                *problem.profile.notes,
                *(note for candidate in ranking.ranked for note in candidate.estimate.notes),
            )
        )
    )
    if loaded.training_step is not None:
        notes.append(
            "each model is priced as run once forward and, where it is trained, backward; a step that runs "
            "one several times is slower"
        )
    if problem.pieces.problem:
        notes.append(f"plans that split the model are left out: {problem.pieces.problem}")
    notes += _of_devices((*ranking.ranked, *ranking.too_large), chosen)
    if (link := cluster.link_of_all).source:
        between = "GPUs" if cluster.devices[-1].kind == "cuda" else "ranks"
        notes.append(f"links between {between}: {link.bytes_per_s / 1e9:.3g} GB/s, {link.source}")
    if not cluster.nodes and not any(each.estimate.is_measured for each in ranking.ranked):
        notes.append(
            f"no plan was tried, so all times are predicted from this machine's rates: {_untried(calibrate_s)}"
        )
    return Answer(
        named,
        loaded.batch,
        ranking,
        tuple(problem.flips(ranking, cluster)),
        tuple(notes),
        problem.is_priced(cluster),
        remedies(problem, cluster, planned.smaller(cluster)) if chosen is None else (),
        _advice(problem, chosen, cluster),
        None if rates is None or chosen is None else outlook(problem, chosen, cluster, rates),
    )


def _untried(calibrate_s: float) -> str:
    if has_gpus():
        return "where there are GPUs, nothing is tried"
    if not calibrate_s:
        return "--calibrate 0 tries none"
    return f"steps are too long for trials of {calibrate_s:.0f} s; --calibrate SECONDS allows more"


def nothing_priced(problem: PlanningProblem, ranking: RankedPlans, cluster: Cluster) -> PlanError:
    """Return an error that says why no plan has a price."""
    if ranking.refused:
        why = "; ".join(f"{kind}: {text}" for kind, text in ranking.refused.items())
        return PlanError(f"no plan could be priced: {why}")
    limits, count = problem.limits(cluster), len(cluster.devices)
    return PlanError(
        f"no plan uses all {count} devices: replicas (at most {limits.batch}, the batch), tensor (at most "
        f"{limits.tensor}) and stages (at most {max(1, limits.layers)}) must multiply to {count}",
        hint="a larger batch or fewer devices; with --price-per-hour X, plans may leave devices out",
    )


def _of_devices(candidates: Sequence[Candidate], chosen: Candidate | None) -> list[str]:
    """Return notes on the memory that GPUs of this machine don't have for tensors.

    Other processes hold some of it, and the chosen plan's ranks need some for themselves.
    """
    notes = reduced_memory(need for candidate in candidates for need in candidate.estimate.needs)
    aside = (
        set_aside(max(chosen.estimate.needs, key=lambda need: need.total_bytes))
        if chosen is not None
        else ""
    )
    return [*notes, aside] if aside else notes


def nothing_fits(ranking: RankedPlans, cluster: str, changes: Sequence[Remedy] = ()) -> PlanError:
    """Return an error that says why no plan was chosen: the gap in bytes, the nearest plans, and
    changes under which one fits.
    """
    nearest = sorted(ranking.too_large, key=lambda candidate: candidate.missing_bytes)[:NEAREST]
    return PlanError(
        f"nothing fits on {cluster}: '{nearest[0].plan}' is nearest and is "
        f"{nearest[0].missing_bytes:,} bytes over",
        hint="\n".join(
            [
                *(f"'{candidate.plan}': {reason(candidate, candidate)}" for candidate in nearest),
                *reduced_memory(need for candidate in nearest for need in candidate.estimate.needs),
                *(
                    [
                        f"what would fit, the least change first: {changes[0]}",
                        *map(str, changes[1:]),
                    ]
                    if changes
                    else []
                ),
            ]
        ),
    )


def _advice(problem: PlanningProblem, chosen: Candidate | None, cluster: Cluster) -> Advice | None:
    """Return advice on the precision of the chosen plan.

    Forward and backward are traced again, because their tensors have other sizes.
    """
    precision = OTHER_PRECISION.get(problem.job.precision)
    if chosen is None or precision is None:
        return None
    try:
        other_problem = PlanningProblem.of(
            replace(problem.job, precision=precision), device=cluster.first_here, like=problem
        )
        return Advice(precision, other_problem.price(chosen.plan, cluster))
    except (PlanError, NotPriced) as error:
        return Advice(precision, str(error).partition("\n")[0])
