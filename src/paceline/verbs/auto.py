"""`plan auto`: the fastest exact plan that fits, found before a run in a small part of the run's own time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.cluster import Cluster
from paceline.errors import UsageError
from paceline.job import Job
from paceline.launch.environment import Environment
from paceline.planner.estimate import Estimate
from paceline.planner.rank import reason
from paceline.planner.resolve import default_plan
from paceline.plans import Plan
from paceline.profile import profile_job
from paceline.profile.profile import Profile
from paceline.verbs.planning import Answer, answer

AUTO = "auto"
PART = 0.1  # of a run's predicted length that finding its plan may take
LEAST_S, MOST_S = 1.0, 30.0  # of rehearsals; less is worth none
WORTH = 1.5  # times the best plan's step: what looks slower is not tried
CUTTING_S = 6.0  # that finding out how a model can be cut must be worth, and trying it


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan that nobody gave. estimate: as far as it is known. why: a line for people. profile: the job's."""

    plan: Plan
    why: str = ""
    estimate: Estimate | None = None
    profile: Profile | None = None


def is_auto(plan: str | Plan | None) -> bool:
    """Whether nobody says how to train."""
    return plan is None or (isinstance(plan, str) and plan.strip() == AUTO)


def choose(job: Job, asked: str | Plan | None, *, devices: str | None, procs: int | None, memory: str | None,
           environment: Environment | None) -> Chosen:
    """The plan for these devices; all of them are used where the user counted or named them.

    Inside a launcher, whose ranks can't try plans, it is one replica a rank. What can't be priced is trained by
    replicas, too.

    Raises:
        UsageError: 'auto' was asked for inside a launcher.
        PlanError: nothing fits.
    """
    if environment is not None:
        if asked is not None:
            raise UsageError(f"plan 'auto' inside {environment.launcher}: its ranks have started, and plans are tried "
                             "before", hint="paceline plan FILE says which plan is the fastest; name it")
        return Chosen(default_plan(job, environment.world_size))
    where = Cluster.local(devices, num_ranks=procs, memory=memory)
    if len(where.devices) == 1:
        return Chosen(Plan())
    try:
        profile = profile_job(job)
    except Exception as error:  # the model may do anything when it is profiled
        return Chosen(default_plan(job, len(where.devices)), f"it can't be priced: {error}".partition("\n")[0])
    return _found(job, where, profile, may_be_fewer=devices is None and procs is None)


def _found(job: Job, where: Cluster, profile: Profile, *, may_be_fewer: bool) -> Chosen:
    """First by prediction alone, among plans that leave the model whole; then, where the run is long enough, by trying
    the best of all."""
    def ask(rehearse_s: float, *, may_split: bool) -> Answer:
        return answer(job, where, profile, name="these devices", may_be_fewer=may_be_fewer, may_split=may_split,
                      rehearse_s=rehearse_s, worth=WORTH)

    quick = ask(0.0, may_split=False)
    steps = job.total_steps or math.inf
    run_s = steps * (quick.found.chosen.estimate.step_s if quick.found.chosen else math.inf)
    budget_s = min(MOST_S, PART * run_s)
    found = ask(budget_s if budget_s >= LEAST_S else 0.0, may_split=budget_s >= CUTTING_S or quick.chosen is None)
    chosen = found.found.chosen
    if chosen is None:
        raise found.nothing_fits()
    return Chosen(chosen.plan, reason(chosen, chosen), chosen.estimate, profile)
