"""Memory that outlives the ranks of a launch: ranks leave copies of their state there, and their successors read it."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.launch.process.live_states import LiveStates
from paceline.launch.process.memory_store import SLOTS, DoubleBuffer

# Of the time of the steps, spent on copies. Watching, hashing, the journal, and what a copy costs the steps beside it
# have the rest of 1 %.
TIME_SHARE = 0.003


class StateCopies(DoubleBuffer):
    """Each rank's last copies.

    live: the ranks' state itself, where they hold it in memory that outlives them.
    """

    def __init__(self, num_ranks: int, *, num_slots: int = SLOTS) -> None:
        super().__init__(num_ranks, "paceline-state", num_slots=num_slots)
        self.live = LiveStates(num_ranks)

    def close(self) -> None:
        self.live.close()
        super().close()

    def newest(self, ranks: Iterable[int]) -> int | None:
        """The last step of which each of these ranks has a copy; None if there is none."""
        common = set.intersection(*(set(self.steps(rank)) for rank in ranks))
        return max(common, default=None)
