"""The keys of all strategies, from which plans are read. Imports no code of ranks or prices."""

from __future__ import annotations

from paceline.base.errors import PlanError
from paceline.strategies import extensions, modifiers
from paceline.strategies.compile.keys import KEYS as COMPILE
from paceline.strategies.compress.keys import KEYS as COMPRESS
from paceline.strategies.data.keys import KEYS as DATA
from paceline.strategies.keys import Key, PlanKeys, of_axis
from paceline.strategies.local.keys import KEYS as LOCAL
from paceline.strategies.recompute.keys import KEYS as RECOMPUTE
from paceline.strategies.server.keys import KEYS as SERVER
from paceline.strategies.shard.keys import KEYS as SHARD
from paceline.strategies.stages.keys import PIPELINE_KEYS, PLACE_KEYS
from paceline.strategies.tensor.keys import KEYS as TENSOR

# In the order of messages.
BUILT_IN: tuple[PlanKeys, ...] = (
    PIPELINE_KEYS,
    PLACE_KEYS,
    DATA,
    SHARD,
    TENSOR,
    LOCAL,
    SERVER,
    COMPRESS,
    RECOMPUTE,
    COMPILE,
    modifiers.KEYS,
)
# The order of keys in a plan's text: axes, then synchronisation, schedule and modifiers.
_ORDER = (
    "pipeline",
    "place",
    "parts",
    "data",
    "shard",
    "tensor",
    "zero",
    "local",
    "outer",
    "fragments",
    "servers",
    "workers",
    "staleness",
    "colocate",
    "damping",
    "schedule",
    "microbatches",
    "virtual",
    "recompute",
    "compile",
    "shares",
    "compress",
    "deterministic",
)
KEYS: dict[str, Key] = dict(
    sorted(
        ((key.name, key) for plan_keys in BUILT_IN for key in plan_keys.all()),
        key=lambda entry: _ORDER.index(entry[0]),
    )
)


# What version 0.2 called keys; its runs and scripts have these names.
EARLIER = {"server": "servers", "accumulate": "microbatches"}


def key(name: str) -> Key | None:
    """Return the key of a name, which may be an earlier one, or None.

    Strategies of other packages are searched for keys that are not built in.
    """
    name = EARLIER.get(name, name)
    return KEYS.get(name) or keys().get(name)


def keys() -> dict[str, Key]:
    """Return all keys in the order of a plan's text; keys of other packages come first.

    Raises:
        PlanError: a strategy of another package adds a key that is built in.
    """
    outside = extensions.axes()
    if taken := sorted(outside.keys() & KEYS.keys()):
        raise PlanError(
            f"a strategy that is installed brings the plan key '{taken[0]}', which is built in",
            hint="its axis needs another name; entry points of the group paceline.strategies name it",
        )
    return {**{name: of_axis(axis) for name, axis in outside.items()}, **KEYS}
