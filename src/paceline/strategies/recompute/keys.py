"""The plan key `recompute`."""

from typing import Literal, get_args

from paceline.strategies.keys import PlanKeys, choice

RecomputeName = Literal["none", "selective", "full"]
RECOMPUTE = choice("recompute", "modifiers", get_args(RecomputeName), default="none")

KEYS = PlanKeys(keys=(RECOMPUTE,))
