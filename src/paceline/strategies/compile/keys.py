"""The plan key `compile`."""

from typing import get_args

from paceline.strategies.keys import PlanKeys, choice
from paceline.strategies.plan_fields import CompileName, Modifiers

COMPILE = choice("compile", "modifiers", get_args(CompileName), default=Modifiers().compile)

KEYS = PlanKeys(keys=(COMPILE,))
