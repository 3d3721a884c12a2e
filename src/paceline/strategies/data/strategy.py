"""The strategy `data`: replicas sum their gradients."""

from paceline.strategies.costs import CostModel
from paceline.strategies.data.cost import enter, hold
from paceline.strategies.data.keys import KEYS
from paceline.strategies.strategy import Strategy

STRATEGY = Strategy(
    name="data=N",
    is_active=lambda plan: plan.axes.data > 1 and plan.outer_steps is None,
    keys=KEYS,
    cost=CostModel(enter, hold=hold),
    run="paceline.strategies.data.run",
)
