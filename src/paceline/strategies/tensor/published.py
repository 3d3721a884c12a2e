"""Reads how a model itself wants its weights to be split: the `tp_plan` of Transformers.

It names modules or parameters by patterns, and gives each a style. Styles that say how a weight is
cut are followed. The other styles describe values between modules, which are found by running the
modules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

Direction = Literal["columns", "rows", "whole"]
# Styles of Transformers 5 (`transformers.integrations.tensor_parallel`).
_STYLES: dict[str, Direction] = {
    "colwise": "columns",
    "colwise_rep": "columns",
    "colwise_gather_output": "columns",
    "packed_colwise": "columns",
    "rowwise": "rows",
    "rowwise_rep": "rows",
    "rowwise_split_input": "rows",
    "packed_rowwise": "rows",
    "replicate": "whole",
    "replicated_with_grad_allreduce": "whole",
}


def published(model: nn.Module) -> dict[str, Direction]:
    """Return how the model wants its parameters to be cut, by name; nothing if it doesn't say.

    Patterns have `*` for numbers. A module's pattern applies to the module's own parameters.
    Unknown styles are left out. A wrong style costs only speed, because every cut is checked by
    running it, or is found anew.
    """
    styles = getattr(model, "tp_plan", None)
    if not isinstance(styles, Mapping) or not styles:
        return {}
    names = [name for name, _ in model.named_parameters()]
    directions: dict[str, Direction] = {}
    for pattern, style in styles.items():
        direction = _STYLES.get(style) if isinstance(style, str) else None
        if direction is not None:
            directions |= dict.fromkeys(_matching(str(pattern), names), direction)
    return directions


def _matching(pattern: str, names: Collection[str]) -> list[str]:
    """Return the parameters whose name, or whose module's name, matches the pattern."""
    words: Any = re.compile(
        r"\.".join(r"\d+" if word == "*" else re.escape(word) for word in pattern.split("."))
    )
    return [
        name for name in names if words.fullmatch(name) or words.fullmatch(name.rpartition(".")[0])
    ]
