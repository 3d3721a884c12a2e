"""How the buckets of several ranks are summed: over the network while backward goes on, or in memory they share."""

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

_BLOCK_BYTES = (
    2**18
)  # what is summed at a time: a block of each rank's stays in a core's cache until it is written
_ALIGNED_BYTES = 64


class Reduction(Protocol):
    """Sums buckets over a group.

    memory: each bucket's, this rank's own, zero at first.
    overlaps: whether sums are under way once they are started, so that it pays to start them beside backward.
    sent_bytes: what this rank has given to others so far, over a network or by way of memory that they share.
    """

    sent_bytes: float
    overlaps: bool

    @property
    def memory(self) -> list[torch.Tensor]: ...

    def start(self, number: int) -> None:
        """A bucket is complete here. Called once a step for every bucket, in one order on all ranks."""

    def finish(self) -> None:
        """On return every bucket holds the sum. Collective."""


class OverNetwork:
    """One all-reduce a bucket, beside the backward that is still going on."""

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
    """Buckets of CPU ranks on one host lie in memory that all of them map.

    Each rank sums its part of every bucket, in the order of ranks, and writes the sum to all of them: every byte is
    read once and written once, where a ring over loopback copies it through sockets on the cores that compute.
    """

    overlaps = False

    def __init__(self, memory: Sequence[list[torch.Tensor]], group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.sent_bytes = group, dist.get_rank(group), 0.0
        self.memory = memory[self.rank]
        self.blocks = [list(_blocks(parts, self.rank)) for parts in zip(*memory, strict=True)]

    def start(self, number: int) -> None:
        """All of them are summed at the end."""

    def finish(self) -> None:
        self._wait_for_all()
        self.sent_bytes += sum(
            all_reduce_bytes(flat.nbytes, dist.get_world_size(self.group)) for flat in self.memory
        )
        for blocks in self.blocks:
            for total, *others in blocks:
                for part in others:
                    total.add_(part)
                for part in others:
                    part.copy_(total)
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        all_reduce(torch.zeros(1), group=self.group)


def reduction(
    like: Sequence[torch.Tensor], sizes: Sequence[int], group: dist.ProcessGroup
) -> Reduction:
    """The faster way for the ranks of a group. Collective.

    Args:
        like: A tensor of each bucket's dtype and device.
        sizes: Elements of each bucket.
    """
    if like and all(tensor.device.type == "cpu" for tensor in like):
        shared = _share(like, sizes, group)
        if shared is not None:
            return InSharedMemory(shared, group)
    return OverNetwork(like, sizes, group)


def _share(
    like: Sequence[torch.Tensor], sizes: Sequence[int], group: dist.ProcessGroup
) -> list[list[torch.Tensor]] | None:
    """Every rank's buckets, mapped here; None if a rank can't map another's. Collective."""
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
    """This rank's share of a bucket, in blocks: each a piece of every rank's memory."""
    size, ranks = len(parts[0]), len(parts)
    step = max(1, _BLOCK_BYTES // parts[0].element_size())
    first, end = size * rank // ranks, size * (rank + 1) // ranks
    for start in range(first, end, step):
        yield tuple(part[start : min(start + step, end)] for part in parts)
