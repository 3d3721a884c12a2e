"""The plan key `data`."""

from paceline.strategies.axes import Axis
from paceline.strategies.keys import PlanKeys

KEYS = PlanKeys(axes=(Axis("data", cuts_samples=True),))
