"""The plan that Paceline chose because the user gave none; `auto.py` makes the choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.strategies.plan import Plan

if TYPE_CHECKING:
    from paceline.model.cost.profile import Profile
    from paceline.planner.estimate import Estimate
    from paceline.planner.search import Candidate

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A plan that Paceline chose because the user gave none."""

    plan: Plan
    why: str = ""  # a line for people
    estimate: Estimate | None = None  # as far as it is known
    profile: Profile | None = None  # the job's
    # the best plan of each kind that was considered, by the same prices
    considered: tuple[Candidate, ...] = ()
    tried_job: str = ""  # see `known_trials.fingerprint`; empty if nothing was tried


def is_auto(plan: str | Plan | None) -> bool:
    """Whether the user leaves the choice of the plan to Paceline."""
    return plan is None or (isinstance(plan, str) and plan.strip() == AUTO)
