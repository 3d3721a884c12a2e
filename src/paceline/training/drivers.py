"""Chooses the code that runs a plan on a rank: the usual loop, or the loop that a strategy of the
plan brings.
"""

from __future__ import annotations

import importlib
from typing import Any

from paceline.job import Job
from paceline.launch.process.context import RankContext
from paceline.launch.process.fault_policy import ALL_NEEDED, FaultPolicy
from paceline.strategies.active_plan import USUAL_LOOP, ActivePlan
from paceline.strategies.plan import Plan
from paceline.training.determinism import repeatable
from paceline.training.settings import Settings


def fault_policy(plan: Plan) -> FaultPolicy:
    """Return the fault policy of a plan: which ranks it can lose."""
    policies = (strategy.fault_policy for strategy in ActivePlan(plan).strategies)
    return next((policy(plan) for policy in policies if policy), ALL_NEEDED)


def train_rank(context: RankContext, job: Job, plan: Plan, settings: Settings) -> Any:
    """Train on this rank. Returns the summary, on rank 0 at least; see `loop.train_rank`.

    Raises:
        NotDeterministic: the plan says deterministic=yes, and the job uses an operator that has no
            deterministic form.
    """
    from paceline.training.blame import note_columns
    from paceline.training.products import float32_products

    train = importlib.import_module(ActivePlan(plan).trainer or USUAL_LOOP).train_rank
    with repeatable(plan), float32_products(job, context):
        try:
            return train(context, job, plan, settings)
        except TypeError as error:
            note_columns(error, job)
            raise
