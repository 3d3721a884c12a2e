"""Modules that are put on ranks as a placement says."""

from paceline.strategies.place.keys import KEYS
from paceline.strategies.strategy import Strategy

STRATEGY = Strategy(
    name="parts=N", is_active=lambda plan: plan.axes.parts > 1, keys=KEYS, is_priced_on_paper=False
)
