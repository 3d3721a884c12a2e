"""The plan key `data`."""

from paceline.strategies.axes import DATA
from paceline.strategies.keys import PlanKeys

KEYS = PlanKeys(axes=(DATA,))
