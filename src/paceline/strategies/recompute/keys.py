"""The plan key `recompute`."""

from typing import get_args

from paceline.strategies.keys import PlanKeys, choice
from paceline.strategies.plan_fields import Modifiers, RecomputeName

RECOMPUTE = choice("recompute", "modifiers", get_args(RecomputeName), default=Modifiers().recompute)

KEYS = PlanKeys(keys=(RECOMPUTE,))
