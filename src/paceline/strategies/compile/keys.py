"""The plan key `compile`."""

from typing import Literal, get_args

from paceline.strategies.keys import PlanKeys, choice

CompileName = Literal["none", "blocks"]
COMPILE = choice("compile", "modifiers", get_args(CompileName), default="none")

KEYS = PlanKeys(keys=(COMPILE,))
