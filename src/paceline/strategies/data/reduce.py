"""Sums the buckets of several ranks: over the network during backward, or in shared memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.base.waiting import waiting
from paceline.strategies.compress.size import all_reduce_bytes
from paceline.strategies.host_all_reduce import all_reduce
from paceline.strategies.shared_memory import HEADER_BYTES, shared_memory

# Bytes that are summed at a time: a block of each rank's memory stays in a core's cache until it is
# written.
_BLOCK_BYTES = 2**18
_ALIGNED_BYTES = 64


class Reduction(Protocol):
    """Sums buckets over a group."""

    # Bytes that this rank has given to others so far, over a network or in shared memory.
    sent_bytes: float
    # Whether a sum runs from its start on, so that it is worth starting it during backward.
    overlaps: bool

    # This rank's memory of each bucket, zero at first.
    @property
    def memory(self) -> list[torch.Tensor]: ...

    def start(self, number: int) -> None:
        """Start the sum of a bucket that is complete on this rank.

        Called once a step for every bucket, in the same order on all ranks.
        """

    def finish(self) -> None:
        """Complete all sums. On return, every bucket holds its sum. Collective."""


class OverNetwork:
    """Runs one all-reduce per bucket while backward continues."""

    overlaps = True

    def __init__(
        self, like: Sequence[torch.Tensor], sizes: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self.group = group
        self.memory = [tensor.new_zeros(size) for tensor, size in zip(like, sizes, strict=True)]
        self.works: list[dist.Work] = []
        self.sent_bytes = 0.0

    def start(self, number: int) -> None:
        self.sent_bytes += all_reduce_bytes(
            self.memory[number].nbytes, dist.get_world_size(self.group)
        )
        self.works.append(dist.all_reduce(self.memory[number], group=self.group, async_op=True))

    def finish(self) -> None:
        with waiting:
            for work in self.works:
                work.wait()
        self.works = []


class InSharedMemory:
    """Sums buckets of CPU ranks on one host, in memory that all of them map.

    Each rank sums its part of every bucket, in the order of ranks, and writes the sum to the memory
    of all ranks. Every byte is read once and written once. A ring over loopback would copy it
    through sockets on the cores that compute.
    """

    overlaps = False

    def __init__(self, memory: Sequence[list[torch.Tensor]], group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.sent_bytes = group, dist.get_rank(group), 0.0
        self.memory = memory[self.rank]
        self.blocks = [list(_blocks(parts, self.rank)) for parts in zip(*memory, strict=True)]
        ranks = dist.get_world_size(group)
        self._step_bytes = sum(all_reduce_bytes(flat.nbytes, ranks) for flat in self.memory)
        self._nothing = torch.zeros(1)

    def start(self, number: int) -> None:
        """Do nothing: `finish` sums all buckets."""

    def finish(self) -> None:
        self._wait_for_all()
        self.sent_bytes += self._step_bytes
        for blocks in self.blocks:
            for total, *others in blocks:
                for part in others:
                    total.add_(part)
                for part in others:
                    part.copy_(total)
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        all_reduce(self._nothing, group=self.group)


def reduction(
    like: Sequence[torch.Tensor], sizes: Sequence[int], group: dist.ProcessGroup
) -> Reduction:
    """Return the faster reduction for the ranks of a group. Collective.

    Args:
        like: A tensor with the dtype and device of each bucket.
        sizes: The number of elements of each bucket.
    """
    if like and all(tensor.device.type == "cpu" for tensor in like):
        shared = _share(like, sizes, group)
        if shared is not None:
            return InSharedMemory(shared, group)
    return OverNetwork(like, sizes, group)


def _share(
    like: Sequence[torch.Tensor], sizes: Sequence[int], group: dist.ProcessGroup
) -> list[list[torch.Tensor]] | None:
    """Map the buckets of every rank.

    Returns None if a rank can't map another's memory. Collective.
    """
    starts, end = [], HEADER_BYTES
    for tensor, size in zip(like, sizes, strict=True):
        starts.append(end)
        end += -(-size * tensor.element_size() // _ALIGNED_BYTES) * _ALIGNED_BYTES
    memory = shared_memory(end, group)
    if memory is None:
        logging.getLogger(__name__).info(
            "gradients meet over the network: these ranks share no memory"
        )
        return None
    return [
        [
            torch.frombuffer(mapping, dtype=tensor.dtype, offset=start, count=size)
            if size
            else tensor.new_zeros(0)
            for tensor, start, size in zip(like, starts, sizes, strict=True)
        ]
        for mapping in memory.mappings
    ]


def _blocks(parts: Sequence[torch.Tensor], rank: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield this rank's part of a bucket in blocks.

    Each block has one tensor in the memory of every rank.
    """
    size, ranks = len(parts[0]), len(parts)
    step = max(1, _BLOCK_BYTES // parts[0].element_size())
    first, end = size * rank // ranks, size * (rank + 1) // ranks
    for start in range(first, end, step):
        yield tuple(part[start : min(start + step, end)] for part in parts)
