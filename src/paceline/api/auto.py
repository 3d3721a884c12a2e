"""`--plan auto`: find the fastest exact plan that fits, before a run and in a small part of its
time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from paceline.api.calibration import TRY_S, try_best
from paceline.api.known_trials import fingerprint
from paceline.api.links import with_links
from paceline.api.plan_choice import PlanChoice
from paceline.api.planning import nothing_fits, nothing_priced
from paceline.base.errors import UsageError
from paceline.base.fork import in_a_fork
from paceline.cluster.accelerators import has_gpus
from paceline.cluster.cluster import Cluster
from paceline.job import Job
from paceline.launch.hosts.environment import Environment
from paceline.planner.problem import PlanningProblem
from paceline.planner.remedies import remedies
from paceline.planner.resolve import default_plan
from paceline.planner.search import Candidate, best_of_each_kind, reason
from paceline.strategies.plan import Plan

PART = 0.1  # part of a run's predicted length that finding its plan may take
LEAST_S = 1.0  # seconds for trials; fewer are not worth the effort
# The model may only be cut if there are this many seconds: finding out how to cut it takes time,
# and so do trials.
CUTTING_S = 6.0


def choose(
    job: Job,
    plan: str | Plan | None,
    *,
    devices: str | None,
    procs: int | None,
    memory: str | None,
    environment: Environment | None,
) -> PlanChoice:
    """Choose the plan for these devices; it uses all of them if the user counted or named them.

    Inside a launcher, whose ranks can't try plans, the plan is one replica per rank. A job that
    can't be priced is trained by replicas, too.

    Raises:
        UsageError: 'auto' was asked for inside a launcher.
        PlanError: nothing fits.
    """
    if environment is not None:
        if plan is not None:
            raise UsageError(
                f"plan 'auto' inside {environment.launcher}: its ranks have started, and plans are tried "
                "before",
                hint="paceline plan FILE says which plan is the fastest; name it",
            )
        return PlanChoice(default_plan(job, environment.world_size))
    cluster = with_links(Cluster.local(devices, num_ranks=procs, memory=memory))
    if len(cluster.devices) == 1:
        return PlanChoice(Plan())
    search = partial(_choose, job, cluster, may_be_fewer=devices is None and procs is None)
    if has_gpus():
        chosen: PlanChoice = in_a_fork(
            lambda: replace(search(), estimate=None, profile=None, considered=())
        )
        return chosen
    return search()


def _choose(job: Job, cluster: Cluster, *, may_be_fewer: bool) -> PlanChoice:
    try:
        problem = PlanningProblem.of(job, device=cluster.first_here)
    except Exception as error:  # the model may do anything when it is profiled
        return PlanChoice(
            default_plan(job, len(cluster.devices)),
            f"it can't be priced: {error}".partition("\n")[0],
        )
    return _search(replace(problem, may_be_fewer=may_be_fewer), cluster)


def _search(problem: PlanningProblem, cluster: Cluster) -> PlanChoice:
    """Search in up to three steps, depending on the length of the run.

    The first search predicts only, among plans that leave the model whole. If the run is long
    enough, a second one also considers plans that split the model. If there is time, the best plans
    are then tried.
    """
    plans = replace(problem, may_split=False).search(cluster)
    part_s = _part_s(problem.job, plans.chosen)
    if plans.chosen is None or part_s >= CUTTING_S:
        plans = problem.search(cluster)
    # otherwise this process uses CUDA by now, and its forks can't
    if not has_gpus():
        problem, plans = try_best(
            problem,
            plans,
            cluster,
            budget_s=min(TRY_S, part_s) if part_s >= LEAST_S else 0.0,
            late_s=part_s,
        )
    chosen = plans.chosen
    if chosen is None and plans.failed:  # the run itself reports what is wrong with the job
        return PlanChoice(
            default_plan(problem.job, len(cluster.devices)),
            f"every plan that was tried failed: {next(iter(plans.refused.values()))}",
        )
    if chosen is None and not plans.too_large:
        raise nothing_priced(problem, plans, cluster)
    if chosen is None:
        raise nothing_fits(plans, "these devices", remedies(problem, cluster))
    exact = [candidate for candidate in plans.ranked if candidate.plan.relaxed is None]
    how = "tried" if chosen.estimate.is_measured else "predicted, not tried"
    return PlanChoice(
        chosen.plan,
        f"{reason(chosen, chosen)} ({how})",
        chosen.estimate,
        problem.profile,
        tuple(best_of_each_kind(exact)),
        fingerprint(problem, cluster) if chosen.estimate.is_measured else "",
    )


def _part_s(job: Job, best: Candidate | None) -> float:
    """Return the seconds that finding a plan may take, as a part of the run."""
    if best is None or job.total_steps is None:
        return TRY_S
    return PART * job.total_steps * best.estimate.step_s
