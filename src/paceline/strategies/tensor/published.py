"""What a model says itself about how its weights are split: the `tp_plan` of Transformers.

It names modules or parameters by pattern and gives each a style. Styles that say how a weight is cut are followed; the
others are about what flows between modules, which is found by running them.
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
    """How the model wants its parameters cut, by name; nothing if it doesn't say.

    Patterns have `*` for numbers. A module's pattern is about its own parameters. What is not known of here is left
    out: wrong words in a plan cost speed, for every cut is found again or checked by running it.
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
    """Parameters with this name, or directly in a module with it."""
    words: Any = re.compile(
        r"\.".join(r"\d+" if word == "*" else re.escape(word) for word in pattern.split("."))
    )
    return [
        name for name in names if words.fullmatch(name) or words.fullmatch(name.rpartition(".")[0])
    ]
