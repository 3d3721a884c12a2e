"""Buffers in which CPU ranks gather a unit and sum its gradients."""

from __future__ import annotations

from typing import Any

import torch

from paceline.strategies.shard.exchange import Buffers, InPlaceReduceScatter

CPU = torch.device("cpu")
ALONE: Any = None  # a group that shares no memory


def test_memory_is_given_out_again_once_nothing_uses_it():
    """A view keeps it, as FSDP2 keeps views of what it gathered."""
    buffers = Buffers(ALONE)
    first = buffers.take(100, torch.float32)
    address, view = first.data_ptr(), first[10:20]
    del first
    other = buffers.take(100, torch.float32)
    assert other.data_ptr() != address
    del view
    assert buffers.take(30, torch.float64).data_ptr() == address


def test_memory_that_is_too_small_is_given_back():
    """As many buffers stay as are used at a time, each of the size of the largest."""
    buffers = Buffers(ALONE)
    for numbers in (10, 1000, 20, 500):
        taken = buffers.take(numbers, torch.float32)
        assert taken.shape == (numbers,) and taken.dtype == torch.float32
        del taken
    assert [memory.numel() for memory in buffers._memory] == [4000]


def test_gradients_have_memory_of_their_own():
    """FSDP2 asks for the whole tensor's buffer, and then for the part that becomes gradients."""
    scatter = InPlaceReduceScatter(Buffers(ALONE), num_ranks=2)
    for _ in range(2):
        whole = scatter.allocate((8,), dtype=torch.float32, device=CPU)
        part = scatter.allocate((4,), dtype=torch.float32, device=CPU)
        kept = whole.untyped_storage().data_ptr()
        assert part.untyped_storage().data_ptr() != kept
        del whole
    assert len(scatter.buffers._memory) == 1
