"""Decides which rank writes a tensor that several ranks hold alike."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.strategies.mesh import Mesh


class Owners:
    """Assigns tensors that several ranks hold alike to the rank that has the fewest bytes so far.

    All ranks that hold these tensors see them in the same order, so they agree without
    communication.

    host_ranks: number of ranks of each host, if the ranks of a host divide all that they hold among
    themselves.
    """

    def __init__(self, mesh: Mesh, *, host_ranks: int | None = None) -> None:
        self._mesh, self._host_ranks = mesh, host_ranks
        # By the axes along which tensors are held alike: the ranks that share the work, and the
        # bytes of each.
        self._ranks_of: dict[tuple[str, ...], list[int]] = {}
        self._bytes: dict[tuple[str, ...], list[int]] = {}

    def owns(self, axes: tuple[str, ...], num_bytes: int) -> bool:
        """Whether this rank writes the next tensor that is held alike along these axes.

        num_bytes: size of the tensor; must be equal on all ranks that hold it.
        """
        ranks = self._ranks(axes)
        dealt = self._bytes.setdefault(axes, [0] * len(ranks))
        owner = dealt.index(min(dealt))
        dealt[owner] += num_bytes + 1  # so that empty tensors are distributed, too
        return ranks[owner] == self._mesh.rank

    def is_first(self, axes: Iterable[str]) -> bool:
        """Whether this rank is the first of the ranks that share the work along these axes."""
        return self._ranks(axes)[0] == self._mesh.rank

    def _ranks(self, axes: Iterable[str]) -> list[int]:
        axes = tuple(axes)
        if axes not in self._ranks_of:
            host_ranks, this_rank = self._host_ranks, self._mesh.rank
            self._ranks_of[axes] = [
                rank
                for rank in self._mesh.ranks_over(axes)
                if host_ranks is None or rank // host_ranks == this_rank // host_ranks
            ]
        return self._ranks_of[axes]
