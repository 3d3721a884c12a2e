"""What doesn't compose, and why: one table for every pair of choices that a plan can't make together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import PlanError
from paceline.plan import Plan


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two choices that exclude each other.

    what: as a user writes it. why: what goes wrong. instead: what to do.
    """

    what: str
    why: str
    instead: str
    is_met: Callable[[Plan], bool]


CONFLICTS: tuple[Conflict, ...] = (
    Conflict("schedule=zero-bubble with shard=N",
             "FSDP2 reduces gradients in hooks of a whole backward, and a backward in two parts passes them by: "
             "gradients come out wrong without an error",
             "schedule=1f1b or interleaved, or data=N in place of shard=N",
             lambda plan: plan.schedule.schedule == "zero-bubble" and plan.axes.shard > 1),
    Conflict("schedule=zero-bubble with recompute=full",
             "each half of the backward would compute the forward again",
             "schedule=1f1b, which recomputes once",
             lambda plan: plan.schedule.schedule == "zero-bubble" and plan.modifiers.recompute == "full"),
)


def check(plan: Plan) -> None:
    """Refuse a plan whose choices don't compose.

    Raises:
        PlanError: says which, why, and what to choose instead.
    """
    for conflict in CONFLICTS:
        if conflict.is_met(plan):
            raise PlanError(f"plan '{plan}': {conflict.what} don't compose: {conflict.why}", hint=conflict.instead)
