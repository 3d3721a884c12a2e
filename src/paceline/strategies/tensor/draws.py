"""Random layers whose ranks hold parts of one tensor: each draws for its own part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def apart(rank: int, device: torch.device) -> Iterator[None]:
    """Draws inside differ from rank to rank; outside, ranks that drew alike go on drawing alike.

    All ranks must enter it at the same point of the same stream. A forward that is computed again draws the same again.
    """
    generator = (
        torch.default_generator
        if device.type == "cpu"
        else torch.cuda.default_generators[device.index or 0]
    )
    with (
        _disable_current_modes()
    ):  # a proof switches the model's draws off; this one tells streams apart
        common = int(
            torch.randint(2**62, (), dtype=torch.int64)
        )  # of the CPU's stream, which is alike on all ranks
    state = generator.get_state()
    generator.manual_seed((common + (rank + 1) * 0x9E3779B97F4A7C15) % 2**63)
    try:
        yield
    finally:
        generator.set_state(state)
