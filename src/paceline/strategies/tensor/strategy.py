"""The strategy `tensor`: the products of layers are split over ranks."""

from paceline.strategies.costs import CostModel
from paceline.strategies.strategy import Strategy
from paceline.strategies.tensor.cost import enter, narrow
from paceline.strategies.tensor.keys import KEYS

STRATEGY = Strategy(
    name="tensor=N",
    is_active=lambda plan: plan.axes.tensor > 1,
    keys=KEYS,
    cost=CostModel(enter, narrow=narrow),
    # A DTensor uses this module to find which part of the whole it holds.
    imports=("torch.distributed.checkpoint",),
)
