"""All strategies, innermost first. For example, `data` reduces the gradients that `shard` leaves to
a rank.

A run applies them in this order, from the innermost change of a model to the outermost exchange.
Blocks are compiled first, then set to recompute, then split and sharded. Finally, the gradients
that a rank holds are reduced over the replicas. Strategies of other packages come last.
"""

from paceline.strategies.compile.strategy import STRATEGY as COMPILE
from paceline.strategies.compress.strategy import STRATEGY as COMPRESS
from paceline.strategies.data.strategy import STRATEGY as DATA
from paceline.strategies.extensions import extensions
from paceline.strategies.local.strategy import STRATEGY as LOCAL
from paceline.strategies.recompute.strategy import STRATEGY as RECOMPUTE
from paceline.strategies.server.strategy import STRATEGY as SERVER
from paceline.strategies.shard.strategy import STRATEGY as SHARD
from paceline.strategies.stages.strategy import PIPELINE, PLACE
from paceline.strategies.strategy import Strategy
from paceline.strategies.tensor.strategy import STRATEGY as TENSOR

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
    """Return all strategies, including those of other packages."""
    return (*BUILT_IN, *extensions())
