"""Replicas that share parameters, gradients and optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.strategies.costs import CostModel
from paceline.strategies.shard.cost import enter, gathers_cast, hold
from paceline.strategies.shard.keys import KEYS
from paceline.strategies.strategy import Observation, Strategy

if TYPE_CHECKING:
    from paceline.strategies.plan import Plan


def _observes(plan: Plan) -> frozenset[Observation]:
    """What a forward writes to parameters; and, where whole blocks are gathered, whether its values choose between
    them, and what is cast before it is gathered.

    Below stage 3 a block stays gathered between the micro-batches of a step; and of several micro-batches some may be
    stand-ins on all ranks, whose writes must leave nothing behind. So parts are written to with one micro-batch alone.
    """
    if plan.splits_model:
        return frozenset({"writes"})
    more: dict[Observation, bool] = {
        "writes to parts": plan.num_microbatches == 1,
        "casts": gathers_cast(plan),
    }
    return frozenset(
        {"writes", "choices", *(observation for observation, is_seen in more.items() if is_seen)}
    )


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
