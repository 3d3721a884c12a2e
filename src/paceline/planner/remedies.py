"""If nothing fits, find the smallest change of each kind that makes something fit, priced like any
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from paceline.base.errors import PacelineError
from paceline.base.tables import in_mib, three_digits
from paceline.cluster.catalogue import memory_sizes
from paceline.cluster.cluster import Cluster
from paceline.job import Precision
from paceline.planner.estimate import NotPriced
from paceline.planner.problem import PlanningProblem, with_memory
from paceline.planner.search import Candidate

HALVINGS = 3  # times that a batch is halved at most
MOST_TIMES = 8  # the largest multiple of the devices that is tried
GIB = 2**30
LOWER_PRECISION: dict[Precision, Precision] = {
    "float32": "bf16",
    "tf32": "bf16",
    "float64": "float32",
}

# The change in words, and a function that gives the planning problem and cluster after it.
Attempt = tuple[str, Callable[[], tuple[PlanningProblem, Cluster]]]


@dataclass(frozen=True)
class Remedy:
    """A change under which a plan fits."""

    change: str
    candidate: Candidate  # the best plan under the change
    batch: int  # samples per step under the change

    def to_dict(self) -> dict[str, Any]:
        """Return the remedy for `--json`."""
        estimate = self.candidate.estimate
        return {
            "change": self.change,
            "plan": str(self.candidate.plan),
            "step_s": estimate.step_s,
            "samples_per_s": self.batch / estimate.step_s,
            "memory_bytes": estimate.peak_memory_bytes,
        }

    def __str__(self) -> str:
        estimate = self.candidate.estimate
        return (
            f"{self.change}: '{self.candidate.plan}', {three_digits(self.batch / estimate.step_s)} samples/s, "
            f"{in_mib(estimate.peak_memory_bytes)}"
        )


def remedies(
    problem: PlanningProblem, cluster: Cluster, smaller: Sequence[Sequence[Attempt]] = ()
) -> tuple[Remedy, ...]:
    """Return the first change of each kind that lets a plan fit, the least change first.

    Changes that affect the experiment least come first: numbers with fewer bits, then changes that
    the caller knows for its job, then the batch. Other devices do not affect the experiment and
    come last. Plans that recompute activations, cut the batch into more parts or split the model in
    another way are no remedies, because the search has tried them all.

    Args:
        smaller: Kinds of changes that whoever made the job knows, each from small to large.
    """
    kinds = [
        _precision(problem, cluster),
        *smaller,
        _batch(problem, cluster),
        *_devices(problem, cluster),
    ]
    return tuple(remedy for attempts in kinds if (remedy := _first_that_fits(attempts)) is not None)


def _first_that_fits(attempts: Iterable[Attempt]) -> Remedy | None:
    for change, make_problem in attempts:
        try:
            problem, cluster = make_problem()
            chosen = problem.search(cluster).chosen
        except (PacelineError, NotPriced):  # the job or the cluster can't be changed in this way
            continue
        if chosen is not None:
            return Remedy(change, chosen, problem.job.batch)
    return None


def _precision(problem: PlanningProblem, cluster: Cluster) -> Iterator[Attempt]:
    if lower := LOWER_PRECISION.get(problem.job.precision):
        yield (
            f"precision={lower}",
            lambda: (
                PlanningProblem.of(
                    replace(problem.job, precision=lower),
                    problem.price_per_hour,
                    device=cluster.first_here,
                    like=problem,
                ),
                cluster,
            ),
        )


def _batch(problem: PlanningProblem, cluster: Cluster) -> Iterator[Attempt]:
    halved = (problem.job.batch // 2**times for times in range(1, HALVINGS + 1))
    for batch in takewhile(lambda size: size >= 1, halved):
        yield (
            f"batch={batch}",
            lambda batch=batch: (  # type: ignore[misc]
                replace(problem, job=replace(problem.job, batch=batch)),
                cluster,
            ),
        )


def _devices(problem: PlanningProblem, cluster: Cluster) -> Iterator[Iterable[Attempt]]:
    """Yield more devices of the same kind, and the same kind with more memory; only for described
    clusters with equal nodes.
    """
    if len(cluster.nodes) != 1:
        return
    count, device = len(cluster.devices), cluster.devices[0]
    yield [
        (f"{more} devices in place of {count}", lambda more=more: (problem, cluster.resized(more)))  # type: ignore[misc]
        for more in _counts(count)
    ]
    (kind,) = cluster.nodes
    yield [
        (
            f"devices of {size / GIB:.0f} GiB in place of {device.memory_bytes / GIB:.0f}",
            lambda size=size: (  # type: ignore[misc]
                problem,
                Cluster.of((with_memory(kind, size / device.memory_bytes),)),
            ),
        )
        for size in memory_sizes()
        if size > device.memory_bytes
    ]


def _counts(count: int) -> list[int]:
    """Return slightly larger numbers first, then multiples of the number."""
    return sorted(
        {count + 1, count + 2, count + 3, *(count * times for times in (2, 4, MOST_TIMES))}
    )
