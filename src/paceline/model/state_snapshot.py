"""What `training/parts/recompute_check.py` alone still imports: this file goes with that one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from paceline.base.streams import set_streams, stream_states
from paceline.model.forward_state import ForwardState, MappingSnapshots


def generators(model: nn.Module) -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Return what gives the attributes of a model and random streams, and what restores them."""
    return [
        (stream_states, set_streams),
        (lambda: ForwardState(model).now().attributes, MappingSnapshots.restore),
    ]
