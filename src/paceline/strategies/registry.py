"""Every strategy, innermost first: `data` reduces what `shard` leaves to a rank, and so on.

The order is that of a run, from the innermost change of a model to the outermost exchange: blocks are first compiled,
then told to recompute, then split and sharded, and the gradients that a rank then holds are reduced over the replicas.
Strategies of other packages come last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.strategies.compile.strategy import STRATEGY as COMPILE
from paceline.strategies.compress.strategy import STRATEGY as COMPRESS
from paceline.strategies.data.strategy import STRATEGY as DATA
from paceline.strategies.extensions import extensions
from paceline.strategies.local.strategy import STRATEGY as LOCAL
from paceline.strategies.pipeline.strategy import STRATEGY as PIPELINE
from paceline.strategies.place.strategy import STRATEGY as PLACE
from paceline.strategies.recompute.strategy import STRATEGY as RECOMPUTE
from paceline.strategies.server.strategy import STRATEGY as SERVER
from paceline.strategies.shard.strategy import STRATEGY as SHARD
from paceline.strategies.strategy import Strategy
from paceline.strategies.tensor.strategy import STRATEGY as TENSOR

if TYPE_CHECKING:
    from paceline.strategies.plan import Plan

BUILT_IN: tuple[Strategy, ...] = (
    COMPILE,
    RECOMPUTE,
    TENSOR,
    PIPELINE,
    PLACE,
    SHARD,
    DATA,
    LOCAL,
    SERVER,
    COMPRESS,
)


def strategies() -> tuple[Strategy, ...]:
    """All of them, those from outside included."""
    return (*BUILT_IN, *extensions())


def active(plan: Plan) -> Iterator[Strategy]:
    """Those that a plan uses, innermost first."""
    known = strategies() if plan.uses_extensions else BUILT_IN
    return (strategy for strategy in known if strategy.is_active(plan))
