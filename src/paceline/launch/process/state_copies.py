"""Memory that outlives the ranks of a launch: ranks leave copies of their state there, and their successors read it."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.launch.process.memory_store import SLOTS, DoubleBuffer

TIME_SHARE = 0.01  # of the time of the steps, spent on copies


class StateCopies(DoubleBuffer):
    """Each rank's last copies."""

    def __init__(self, num_ranks: int, *, num_slots: int = SLOTS) -> None:
        super().__init__(num_ranks, "paceline-state", num_slots=num_slots)

    def newest(self, ranks: Iterable[int]) -> int | None:
        """The last step of which each of these ranks has a copy; None if there is none."""
        common = set.intersection(*(set(self.steps(rank)) for rank in ranks))
        return max(common, default=None)
