"""Checks whether the choices of a plan compose. Each strategy states its own conflicts."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.base.errors import PlanError
from paceline.job import Job, Precision
from paceline.strategies.plan import Plan
from paceline.strategies.registry import active, strategies
from paceline.strategies.strategy import Conflict

# Conflicts of modifiers that belong to no strategy.
OF_MODIFIERS: tuple[Conflict, ...] = (
    Conflict(
        "deterministic=yes with shares=speed or memory",
        "they are measured when a run starts, and another run may cut the batch in other parts",
        "shares=A:B with numbers, or equal shares",
        lambda plan: (
            plan.modifiers.deterministic == "yes" and plan.modifiers.shares in ("speed", "memory")
        ),
    ),
)
# Conflicts of a job's precision. The precision is part of the experiment, so the plan has to
# change.
OF_PRECISION: dict[Precision, tuple[Conflict, ...]] = {
    "fp8": (
        Conflict(
            "tensor=N, pipeline=N and place=",
            "the model is recorded operator by operator there, and torchao's "
            "float8 layers can't be recorded",
            'data=N, shard=N or both, with recompute=full where memory is short, or precision="bf16" in the job',
            lambda plan: plan.splits_model,
        ),
    ),
}


def stated(precision: Precision | None = None) -> Iterable[Conflict]:
    """Yield all conflicts that hold for every job or, if a precision is given, only its additional
    ones."""
    for strategy in strategies():
        yield from (
            strategy.precision_conflicts.get(precision, ()) if precision else strategy.conflicts
        )
    yield from OF_PRECISION.get(precision, ()) if precision else OF_MODIFIERS


def check(plan: Plan) -> None:
    """Refuse a plan whose choices don't compose.

    Raises:
        PlanError: two choices conflict. The message says which, why, and what to choose instead.
    """
    for conflict in stated():
        if conflict.is_met(plan):
            raise PlanError(
                f"plan '{plan}': {conflict.choices} don't compose: {conflict.why}",
                hint=conflict.instead,
            )


def check_own_step(plan: Plan) -> None:
    """Refuse a plan that cannot run a job which defines its own step.

    Raises:
        PlanError: a strategy conflicts. The message says which, why, and what to choose instead.
    """
    for strategy in strategies():
        for conflict in strategy.own_step_conflicts:
            if conflict.is_met(plan):
                raise PlanError(
                    f"plan '{plan}': {conflict.choices} and a job with models= don't compose: "
                    f"{conflict.why}",
                    hint=conflict.instead,
                )


def check_job(plan: Plan, job: Job) -> None:
    """Refuse a plan that cannot run a job of this precision, or with these parts of a run.

    Raises:
        PlanError: a choice conflicts. The message says which, why, and what to choose instead.
    """
    check_precision(plan, job.precision)
    if job.parts and (apart := [strategy.name for strategy in active(plan) if strategy.trainer]):
        raise PlanError(
            f"plan '{plan}': {apart[0]} and a job with parts= don't compose: its ranks take steps "
            "in a loop of their own, which has no such parts",
            hint="data=N, shard=N, or callbacks= in place of parts=",
        )


def check_precision(plan: Plan, precision: Precision) -> None:
    """Refuse a plan that cannot run a job of this precision.

    Raises:
        PlanError: a choice conflicts. The message says which, why, and what to choose instead.
    """
    for conflict in stated(precision):
        if conflict.is_met(plan):
            raise PlanError(
                f"plan '{plan}': {conflict.choices} and precision=\"{precision}\" don't compose: "
                f"{conflict.why}",
                hint=conflict.instead,
            )
