"""What the ranks of a run are to each other, and whether those that were lost are started again."""

from __future__ import annotations

from dataclasses import dataclass

RESTARTS = 100  # of ranks in a run, if the user doesn't say
# For enough hosts to come, or for a host that lost the others to find them again; torch's own default.
JOIN_S = 600.0
_FRUITLESS = 2  # restarts in a row, without a step that was not taken before


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """How ranks meet, and which of them the others can do without.

    uses_process_group: whether all of them form a process group of torch's; without one they find each other in the
        store.
    optional_ranks: ranks that may be killed while the others go on.
    """

    uses_process_group: bool = True
    optional_ranks: frozenset[int] = frozenset()


ALL_NEEDED = FaultPolicy()  # ranks that all need each other


class RestartPolicy:
    """Whether ranks that were lost are started again: while tries are left, and something comes of them.

    left: tries. Who is lost again and again is a rank's number, or 0 for all ranks together.
    """

    def __init__(self, left: int) -> None:
        self.left = left
        self._furthest: dict[int, int] = {}  # the step in which each was lost
        self._fruitless: dict[int, int] = {}  # losses of each in a row that came no further

    def why_not(self, step: int, who: int = 0) -> str:
        """Say why who was lost in this step is not started again; "" if it is."""
        if self.left < 1:
            return "no restarts are left"
        furthest, times = self._furthest.get(who, -1), self._fruitless.get(who, 0)
        if step > furthest or times < _FRUITLESS:
            return ""
        return f"{times + 1} starts in a row came no further than step {furthest}"

    def count(self, step: int, who: int = 0) -> str:
        """Take a restart off. Returns how many are left, in words."""
        is_further = step > self._furthest.get(who, -1)
        self._fruitless[who] = 0 if is_further else self._fruitless.get(who, 0) + 1
        self._furthest[who] = max(step, self._furthest.get(who, -1))
        self.left -= 1
        return f"({self.left} restart{'s' * (self.left != 1)} left)"
