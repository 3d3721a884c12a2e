"""Which ranks meet along which axis of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Mesh:
    """This rank's place among the ranks: axes with their sizes, outermost first, neighbours in the last one.

    >>> Mesh({"data": 2, "shard": 2}, rank=3).coordinates
    {'data': 1, 'shard': 1}
    """

    sizes: dict[str, int]
    rank: int
    _groups: dict[str, ProcessGroup] = field(default_factory=dict, compare=False)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def coordinates(self) -> dict[str, int]:
        found, rest = {}, self.rank
        for axis, size in reversed(self.sizes.items()):
            rest, found[axis] = divmod(rest, size)
        return {axis: found[axis] for axis in self.sizes}

    def ranks_along(self, axis: str) -> list[int]:
        """Ranks that differ from this one in this axis only, in order."""
        stride = self._stride(axis)
        first = self.rank - self.coordinates[axis] * stride
        return [first + i * stride for i in range(self.sizes[axis])]

    def group(self, axis: str) -> ProcessGroup:
        """The process group along an axis. `connect` must have been called."""
        return self._groups[axis]

    def connect(self) -> None:
        """Make the process group of every axis above 1. Collective: every rank calls it."""
        import torch.distributed as dist

        for axis, size in self.sizes.items():
            if size == self.world_size and size > 1:
                self._groups[axis] = dist.group.WORLD  # type: ignore[assignment]
            elif size > 1:
                for first in range(self.world_size):  # every rank makes every group, in one order
                    ranks = Mesh(self.sizes, first).ranks_along(axis)
                    if ranks[0] == first:
                        group = dist.new_group(ranks)
                        if self.rank in ranks:
                            self._groups[axis] = group

    def _stride(self, axis: str) -> int:
        after = list(self.sizes)[list(self.sizes).index(axis) + 1:]
        return math.prod(self.sizes[name] for name in after)
