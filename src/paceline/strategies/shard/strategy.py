"""The strategy `shard`: replicas share parameters, gradients and optimizer state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.strategies.costs import CostModel
from paceline.strategies.shard.cost import enter, gathers_cast, hold
from paceline.strategies.shard.keys import KEYS
from paceline.strategies.strategy import Observation, Strategy

if TYPE_CHECKING:
    from paceline.strategies.plan import Plan


def _observes(plan: Plan) -> frozenset[Observation]:
    """Return the observations that sharding needs.

    It always needs the parameters that a forward writes to. If whole blocks are gathered, it also
    needs whether values choose between blocks, and which parameters are cast before they are
    gathered.

    Writes to parts are possible only with one micro-batch, for two reasons. Below stage 3, a block
    stays gathered between the micro-batches of a step. And some of several micro-batches may be
    padding batches on all ranks, whose writes must have no effect.
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
