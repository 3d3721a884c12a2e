"""The plan key `tensor`."""

from paceline.strategies.axes import TENSOR
from paceline.strategies.keys import PlanKeys

KEYS = PlanKeys(axes=(TENSOR,))
