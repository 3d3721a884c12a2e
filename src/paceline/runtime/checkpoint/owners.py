"""Who writes what several ranks hold alike."""

from __future__ import annotations

import math

from paceline.strategies.mesh import Mesh


class Owners:
    """Deals out tensors that ranks hold alike, each to the rank that has the fewest bytes yet. All ranks that hold them
    see them in the same order, so they agree without a word."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._bytes: dict[tuple[str, ...], list[int]] = {}  # by axes along which tensors are held alike, of each rank

    def owns(self, axes: tuple[str, ...], num_bytes: int) -> bool:
        """Whether this rank writes the next tensor that is held alike along these axes. num_bytes: alike on all ranks
        that hold it."""
        dealt = self._bytes.setdefault(axes, [0] * math.prod(self._mesh.sizes[axis] for axis in axes))
        owner = dealt.index(min(dealt))
        dealt[owner] += num_bytes + 1  # so that empty tensors are dealt out, too
        return owner == self._mesh.number(axes)
