"""Cuts of one tensor over the ranks that compute a layer together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Cut:
    """A cut of a tensor along a dim."""

    dim: int
    # Number of equal blocks of the dim, each of which is cut. A product that computes q, k and v
    # has three.
    blocks: int = 1

    def placement(self) -> Any:
        """Return the cut as a DTensor placement."""
        from torch.distributed.tensor import Shard

        from paceline.torch_private.placements import StridedShard

        return (
            Shard(self.dim)
            if self.blocks == 1
            else StridedShard(self.dim, split_factor=self.blocks)
        )

    def divides(self, length: int, ranks: int) -> bool:
        return length % (self.blocks * ranks) == 0

    def part_shape(self, shape: Sequence[int], ranks: int) -> list[int]:
        """Return the shape of a rank's part of a tensor of this shape."""
        return [length // ranks if dim == self.dim else length for dim, length in enumerate(shape)]

    def local_slice(self, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """Return a rank's part of a whole tensor. It is a view if there is one block."""
        length = tensor.shape[self.dim] // (self.blocks * ranks)
        if self.blocks == 1:
            return tensor.narrow(self.dim, rank * length, length)
        parts = tensor.unflatten(self.dim, (self.blocks, -1))
        return parts.narrow(self.dim + 1, rank * length, length).flatten(self.dim, self.dim + 1)


def cut_of_placement(placement: Any) -> Cut | None:
    """Return the cut of a DTensor placement; None for a whole tensor, or for a pending sum."""
    from torch.distributed.tensor import Shard

    from paceline.torch_private.placements import StridedShard

    if isinstance(placement, StridedShard):
        return Cut(placement.dim, int(placement.split_factor))
    return Cut(placement.dim) if isinstance(placement, Shard) else None
