"""Who runs a plan on a rank: one line for every way in which updates meet."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from paceline.job import Job
from paceline.launch.context import RankContext
from paceline.launch.crew import PEERS, Crew
from paceline.plans import AllReduce, Local, Plan, Servers
from paceline.runtime.determinism import repeatable
from paceline.runtime.loop import Settings
from paceline.runtime.servers.roles import crew as server_crew

_LOOP = "paceline.runtime.loop"
_TRAINERS = {AllReduce: _LOOP, Local: _LOOP, Servers: "paceline.runtime.servers.train"}
_CREWS: dict[type, Callable[[Plan], Crew]] = {Servers: server_crew}


def crew(plan: Plan) -> Crew:
    """What the ranks of a plan are to each other."""
    return _CREWS[type(plan.sync)](plan) if type(plan.sync) in _CREWS else PEERS


def train_rank(context: RankContext, job: Job, plan: Plan, settings: Settings) -> Any:
    """Train on this rank. Returns the summary, on rank 0 at least; see `loop.train_rank`.

    Raises:
        NotDeterministic: the plan says deterministic=yes, and the job uses an operator that has no deterministic form.
    """
    from paceline.runtime.products import float32_products

    train = importlib.import_module(_TRAINERS[type(plan.sync)]).train_rank
    with repeatable(plan), float32_products(job, context):
        return train(context, job, plan, settings)
