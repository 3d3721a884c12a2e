"""Sums the buckets of several ranks: over the network during backward, or in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.base.waiting import waiting
from paceline.launch.collectives.group import allocate, shares_memory
from paceline.strategies.compress.size import all_reduce_bytes


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


class Uncompressed:
    """Sums buckets as they are: one all-reduce each.

    Over a network, it runs while backward continues. CPU ranks on one host sum all buckets at the
    end, in memory that they share: there, an all-reduce needs the cores that compute.
    """

    def __init__(
        self, like: Sequence[torch.Tensor], sizes: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        """Allocate the buckets.

        Args:
            like: A tensor with the dtype and device of each bucket.
            sizes: The number of elements of each bucket.
        """
        self.group, self.sent_bytes = group, 0.0
        in_memory = all(tensor.device.type == "cpu" for tensor in like) and shares_memory(group)
        self.overlaps = not in_memory
        self.memory = [
            allocate(size * tensor.element_size(), group).view(tensor.dtype)
            if in_memory
            else tensor.new_zeros(size)
            for tensor, size in zip(like, sizes, strict=True)
        ]
        self.works: list[dist.Work] = []

    def start(self, number: int) -> None:
        self.sent_bytes += all_reduce_bytes(
            self.memory[number].nbytes, dist.get_world_size(self.group)
        )
        if self.overlaps:
            self.works.append(dist.all_reduce(self.memory[number], group=self.group, async_op=True))

    def finish(self) -> None:
        if not self.overlaps:
            for flat in self.memory:
                dist.all_reduce(flat, group=self.group)
        with waiting:
            for work in self.works:
                work.wait()
        self.works = []
