"""Random draws in layers whose ranks hold parts of one tensor. Each rank draws for its own part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.torch_private.dispatch import without_all_modes


@contextmanager
def apart(rank: int, device: torch.device) -> Iterator[None]:
    """Make draws differ between ranks while the context is entered. Afterwards, equal streams
    continue equally.

    All ranks must enter it at the same point of the same stream. A forward that is recomputed draws
    the same numbers.
    """
    generator = (
        torch.default_generator
        if device.type == "cpu"
        else torch.cuda.default_generators[device.index or 0]
    )
    # A proof switches the model's draws off; this draw is needed to separate the streams.
    with without_all_modes():
        # Drawn from the CPU's stream, which is equal on all ranks.
        common = int(torch.randint(2**62, (), dtype=torch.int64))
    state = generator.get_state()
    generator.manual_seed((common + (rank + 1) * 0x9E3779B97F4A7C15) % 2**63)
    try:
        yield
    finally:
        generator.set_state(state)
