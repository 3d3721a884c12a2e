"""The plan key `tensor`."""

from paceline.strategies.axes import Axis
from paceline.strategies.keys import PlanKeys

KEYS = PlanKeys(axes=(Axis("tensor", cuts_weights=True),))
