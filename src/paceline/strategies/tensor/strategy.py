"""Layers whose products are split over ranks."""

from paceline.strategies.costs import CostModel
from paceline.strategies.strategy import Strategy
from paceline.strategies.tensor.cost import enter, narrow

STRATEGY = Strategy(
    name="tensor=N",
    is_active=lambda plan: plan.axes.tensor > 1,
    cost=CostModel(enter, narrow=narrow),
    imports=("torch.distributed.checkpoint",),  # a DTensor asks it which part of the whole it holds
)
