"""JSON that every parser can read: without NaN and infinity, which JSON does not have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def strict(value: Any) -> Any:
    """Return the document with null in place of the numbers that JSON can't hold.

    >>> strict({"loss": float("nan"), "steps": (1, 2)})
    {'loss': None, 'steps': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(key): strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
