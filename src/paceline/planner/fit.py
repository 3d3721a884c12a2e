"""Check whether a plan fits its devices; if not, show the ledger and which plans would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from paceline.base.errors import PlanError
from paceline.base.tables import aligned
from paceline.cluster.cluster import Cluster
from paceline.job import Job
from paceline.planner.corrections import MEASURED
from paceline.planner.estimate import Estimate
from paceline.planner.microbatches import ANY_RATES
from paceline.planner.problem import PlanningProblem
from paceline.planner.rank_kinds import MemoryNeed
from paceline.planner.remedies import remedies
from paceline.planner.search import kind_of
from paceline.strategies.plan import Plan

MIB = 2**20
# The most ranks that are tried if a plan doesn't fit; ranks on one machine may outnumber its cores.
MOST_CPU_RANKS = 8
# Part of the predicted need that another plan may have, after a plan ran out of memory against its
# prediction.
LESS = 0.85
SET_ASIDE = "set aside"  # the column for memory that a GPU needs beside tensors
_COLUMNS = {
    "weights": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "communication": ("communication",),
    "other": ("runtime", "holes", "workspaces", "checkpoint", MEASURED),
    SET_ASIDE: ("context", "NCCL", "reserve"),
}


def check_fits(problem: PlanningProblem, plan: Plan, cluster: Cluster, *, snapshot: bool) -> None:
    """Refuse a plan that needs more memory than its devices have, before anything starts.

    Raises:
        PlanError: with the ledger of every kind of rank, and plans that would fit.
    """
    estimate = _estimate(problem, plan, cluster, snapshot=snapshot)
    if estimate.fits:
        return
    worst = max(estimate.needs, key=lambda need: need.missing_bytes)
    reasons = "".join(
        f"\n{line}" for line in (set_aside(worst), *reduced_memory(estimate.needs)) if line
    )
    others: dict[str, str] = {}
    for other, needs in _from_small_to_large(problem, plan, cluster, snapshot=snapshot):
        if all(need.missing_bytes <= 0 for need in needs) and kind_of(other) not in others:
            most_bytes = max(need.total_bytes for need in needs)
            others[kind_of(other)] = f"  {other!s:<34} {most_bytes / MIB:>8,.0f} MiB a rank"
    raise PlanError(
        f"plan '{plan}' doesn't fit: it needs {worst.total_bytes / MIB:,.0f} MiB on a rank that may use "
        f"{worst.device.memory_bytes / MIB:,.0f} MiB\n{ledger(estimate.needs)}{reasons}",
        hint="\n".join(["plans that fit:", *others.values()])
        if others
        else _other_than_plans(problem, cluster),
    )


def smallest_change(
    problem: PlanningProblem, plan: Plan, cluster: Cluster, *, snapshot: bool
) -> str:
    """Return the ledger of a plan that ran out of memory, and the smallest change that is predicted
    to fit.
    """
    estimate = _estimate(problem, plan, cluster, snapshot=snapshot)
    worst = max(estimate.needs, key=lambda need: need.missing_bytes)
    allowed_bytes = min(worst.device.memory_bytes, int(LESS * worst.total_bytes))
    lines = [f"what each rank of '{plan}' was predicted to need:", ledger(estimate.needs)]
    for other, needs in _from_small_to_large(problem, plan, cluster, snapshot=snapshot):
        most = max(needs, key=lambda need: need.total_bytes)
        if most.total_bytes <= allowed_bytes:
            return "\n".join(
                [
                    *lines,
                    f"the smallest change that needs less: --plan '{other}', "
                    f"{most.total_bytes / MIB:,.0f} MiB a rank",
                ]
            )
    tight = replace(
        cluster,
        devices=tuple(replace(device, memory_bytes=allowed_bytes) for device in cluster.devices),
    )
    return "\n".join(
        [*lines, "no change of plan needs so much less", _other_than_plans(problem, tight)]
    )


def _other_than_plans(problem: PlanningProblem, cluster: Cluster) -> str:
    """Return changes of the job or the devices under which some plan fits."""
    if not cluster.nodes and any(
        device.kind != "cpu" for device in cluster.devices
    ):  # whose rates are not taken here
        return (
            "devices with more memory, or a smaller model; paceline plan FILE lists what would fit"
        )
    changes = remedies(problem, cluster)
    if not changes:
        return (
            "devices with more memory, or a smaller model: none of the plans that were tried fits"
        )
    return "\n".join(
        [
            "no other plan fits; what would, the least change first:",
            *(f"  {change}" for change in changes),
        ]
    )


def _from_small_to_large(
    problem: PlanningProblem, plan: Plan, cluster: Cluster, *, snapshot: bool
) -> Iterator[tuple[Plan, Sequence[MemoryNeed]]]:
    """Yield plans that may need less, each with the needs of its kinds of ranks: smaller
    micro-batches, recomputation, then other ways to split over as many ranks or more.
    """
    job, ranks = problem.job, plan.world_size
    most = MOST_CPU_RANKS
    if cluster.devices[-1].kind != "cpu":
        most = max(ranks, len(Cluster.local().devices))
    samples = -(-job.batch // plan.replicas)
    counts = [
        count
        for count in (2, 4, 8, 16, 32, 64, samples)
        if plan.num_microbatches < count <= samples
    ]
    tried = [plan.with_(microbatches=count) for count in sorted(set(counts))]
    tried += [smaller.with_(recompute="full") for smaller in (plan, *tried)]
    tried += [
        other
        for size in (ranks, *(size for size in (2, 4, 8, 16) if ranks < size <= most))
        for other in _other_splits(size, job)
    ]
    for other in tried:
        try:
            estimate = _estimate(problem, other, _as_many(cluster, other), snapshot=snapshot)
        except PlanError:  # the keys don't compose, or there are fewer pieces than ranks
            continue
        yield other, estimate.needs


def _other_splits(size: int, job: Job) -> list[Plan]:
    if size == 1:
        return []
    sharded = (
        [Plan.of(shard=size, recompute=how) for how in ("none", "full")]
        if size <= job.batch
        else []
    )
    return [
        *sharded,
        Plan.of(pipeline=size, microbatches=min(2 * size, job.batch)),
        Plan.of(place=size),
    ]


def _as_many(cluster: Cluster, plan: Plan) -> Cluster:
    """Return the cluster with one device per rank, like those it has; like its GPUs, if it also has
    CPUs.
    """
    same_kind = [device for device in cluster.devices if device.kind == cluster.devices[-1].kind]
    if plan.world_size == len(same_kind):
        return replace(cluster, devices=tuple(same_kind))
    least = min(same_kind, key=lambda device: device.memory_bytes)
    return replace(
        cluster, devices=tuple(replace(least, index=index) for index in range(plan.world_size))
    )


def set_aside(need: MemoryNeed) -> str:
    """Return how much memory a GPU needs in addition to a rank's tensors, and for what; empty if it
    is nothing.
    """
    for_what = {
        "context": "for the driver's context",
        "NCCL": "for NCCL's buffers",
        "reserve": "for what torch's allocator rounds up",
    }
    parts = [
        f"{need.ledger[key] / MIB:,.0f} {why}"
        for key, why in for_what.items()
        if need.ledger.get(key)
    ]
    return f"MiB set aside on a GPU: {', '.join(parts)}" if parts else ""


def reduced_memory(needs: Iterable[MemoryNeed]) -> list[str]:
    """Return which devices have less than all of their memory, and who has the rest."""
    return list(dict.fromkeys(need.device.taken for need in needs if need.device.taken))


def ledger(needs: Sequence[MemoryNeed]) -> str:
    """Return the memory of each kind of rank at its peak, in MiB, one line each."""
    columns = {
        name: keys
        for name, keys in _COLUMNS.items()
        if name != SET_ASIDE or any(key in need.ledger for need in needs for key in keys)
    }
    rows = []
    for need in needs:
        figures = [sum(need.ledger.get(key, 0) for key in keys) for keys in columns.values()]
        rows.append(
            [
                need.name,
                *(f"{figure / MIB:,.1f}" for figure in (*figures, need.total_bytes)),
                f"{need.device.memory_bytes / MIB:,.0f}"
                + (" too little" if need.missing_bytes > 0 else ""),
            ]
        )
    return aligned(["MiB", *columns, "sum", "limit"], rows)


def _estimate(
    problem: PlanningProblem, plan: Plan, cluster: Cluster, *, snapshot: bool
) -> Estimate:
    return problem.price(plan, cluster, rates=ANY_RATES, snapshot=snapshot)
