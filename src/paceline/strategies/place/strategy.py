"""The strategy `parts`: a placement assigns modules to ranks."""

from paceline.strategies.place.keys import KEYS
from paceline.strategies.strategy import Strategy

STRATEGY = Strategy(
    name="parts=N", is_active=lambda plan: plan.axes.parts > 1, keys=KEYS, is_priced_on_paper=False
)
