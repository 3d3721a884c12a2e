"""Buckets are summed alike in shared memory and over the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.strategies.data.reduce import Reduction, Uncompressed

# Less than a block, several blocks and a rest, nothing at all, fewer elements than ranks.
SIZES = (5, 3 * 2**16 + 7, 0, 1)
DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16)


def fill(reduction: Reduction, rank: int, step: int) -> None:
    for number, memory in enumerate(reduction.memory):
        memory.copy_(torch.arange(len(memory)) % 13 + 10 * rank + step + number)


def sums(made: Reduction, rank: int) -> list[list[torch.Tensor]]:
    """What is in the buckets after each of three steps."""
    sums_by_step = []
    for step in range(3):
        fill(made, rank, step)
        for number in range(len(SIZES)):
            made.start(number)
        made.finish()
        sums_by_step.append([memory.clone() for memory in made.memory])
    return sums_by_step


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_shared_memory_sums_as_the_network_does(
    run_ranks: Callable[..., list[Any]], ranks: int
) -> None:
    def body(context: Any) -> bool:
        like = [torch.zeros(0, dtype=dtype) for dtype in DTYPES]
        shared = Uncompressed(like, SIZES, dist.group.WORLD)
        network = Uncompressed(like, SIZES, dist.new_group(backend="gloo"))
        assert network.overlaps and not shared.overlaps
        pairs = zip(sums(shared, context.rank), sums(network, context.rank), strict=True)
        return all(torch.equal(a, b) for step in pairs for a, b in zip(*step, strict=True))

    assert run_ranks(body, ranks) == [True] * ranks
