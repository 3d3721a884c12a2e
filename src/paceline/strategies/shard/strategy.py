"""Replicas that share parameters, gradients and optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.strategies.costs import CostModel
from paceline.strategies.shard.cost import enter, hold
from paceline.strategies.shard.keys import KEYS
from paceline.strategies.strategy import Observation, Strategy

if TYPE_CHECKING:
    from paceline.plans import Plan


def _observes(plan: Plan) -> frozenset[Observation]:
    """What a forward writes to parameters; and, where whole blocks are gathered, whether its values choose between
    them."""
    return frozenset({"writes"} if plan.splits_model else {"writes", "choices"})


STRATEGY = Strategy(
    name="shard=N",
    is_active=lambda plan: plan.axes.shard > 1,
    keys=KEYS,
    code=lambda plan: (plan.zero,),
    cost=CostModel(enter, hold=hold),
    run="paceline.strategies.shard.run",
    imports=("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"),
    observes=_observes,
)
