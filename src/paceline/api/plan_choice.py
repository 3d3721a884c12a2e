"""The plan of a run that nobody gave, as far as every run must know of it; `auto.py` chooses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.strategies.plan import Plan

if TYPE_CHECKING:
    from paceline.model.cost.profile import Profile
    from paceline.planner.estimate import Estimate

AUTO = "auto"


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
