"""Checks whether the choices of a plan compose. Each strategy states its own conflicts."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.base.errors import PlanError
from paceline.job import Job
from paceline.strategies.plan import Plan
from paceline.strategies.registry import strategies
from paceline.strategies.strategy import Conflict

# Conflicts that belong to no strategy.
_OTHERS: tuple[Conflict, ...] = (
    Conflict(
        "deterministic=yes with shares=speed or memory",
        "they are measured when a run starts, and another run may cut the batch in other parts",
        "shares=A:B with numbers, or equal shares",
        lambda plan: (
            plan.modifiers.deterministic == "yes" and plan.modifiers.shares in ("speed", "memory")
        ),
    ),
    Conflict(
        "tensor=N, pipeline=N and place=",
        "the model is recorded operator by operator there, and torchao's "
        "float8 layers can't be recorded",
        'data=N, shard=N or both, with recompute=full where memory is short, or precision="bf16" in the job',
        lambda plan: plan.splits_model,
        of_job='precision="fp8"',
    ),
)


def stated(of_job: str = "") -> Iterator[Conflict]:
    """Yield the conflicts with a choice of a job, or by default those that hold for every job."""
    for conflicts in (*(strategy.conflicts for strategy in strategies()), _OTHERS):
        yield from (conflict for conflict in conflicts if conflict.of_job == of_job)


def check(plan: Plan, of_job: str = "") -> None:
    """Refuse a plan whose choices don't compose with each other, or with a choice of a job.

    Args:
        of_job: The job's choice, as conflicts state it; "" for conflicts that hold for every job.

    Raises:
        PlanError: two choices conflict. The message says which, why, and what to choose instead.
    """
    for conflict in stated(of_job):
        if conflict.is_met(plan):
            choices = f"{conflict.choices} and {of_job}" if of_job else conflict.choices
            raise PlanError(
                f"plan '{plan}': {choices} don't compose: {conflict.why}", hint=conflict.instead
            )


def check_job(plan: Plan, job: Job) -> None:
    """Refuse a plan that cannot run a job of this precision, or with these parts of a run.

    Raises:
        PlanError: see `check`.
    """
    check(plan, f'precision="{job.precision}"')
    if job.parts:
        check(plan, "a job with parts=")


def check_own_step(plan: Plan) -> None:
    """Refuse a plan that cannot run a job which defines its own step.

    Raises:
        PlanError: see `check`.
    """
    check(plan, "a job with models=")
