"""Memory that outlives the ranks of a launch: ranks leave copies of their state there, and their successors read it.

The memory belongs to files without a name (`memory_files.py`), which the launching process makes before it forks. The
kernel frees them with the last process of the launch, however that ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence

from paceline.launch.live_states import LiveStates
from paceline.launch.memory_files import memory_file, read_at, write_at

# Of the time of the steps, spent on copies. Watching, hashing, the journal, and what a copy costs the steps beside it
# have the rest of 1 %.
TIME_SHARE = 0.005
SLOTS = 2  # a rank: one keeps the last copy while the next one is written into the other
_WORDS, _WORD_BYTES = 3, 8  # of a slot: the copy's step, and where its index begins and ends
_NOTHING = -1


class StateCopies:
    """Two slots a rank. A slot's step is written last and cleared first, so what has a step is whole.

    live: the ranks' state itself, where they hold it in memory that outlives them.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.live = LiveStates(num_ranks)
        self._files = [memory_file("paceline-state") for _ in range(SLOTS * num_ranks)]
        self._words = memoryview(mmap.mmap(-1, _WORDS * _WORD_BYTES * len(self._files))).cast("q")
        for rank in range(num_ranks):
            self.keep(rank, until=None)

    def close(self) -> None:
        self.live.close()
        for descriptor in self._files:
            os.close(descriptor)

    def steps(self, rank: int) -> dict[int, int]:
        """The slots of this rank's copies, by the step after which each was made."""
        steps = {self._words[_WORDS * slot]: slot for slot in range(SLOTS * rank, SLOTS * (rank + 1))}
        return {step: slot for step, slot in steps.items() if step != _NOTHING}

    def newest(self, ranks: Iterable[int]) -> int | None:
        """The last step of which each of these ranks has a copy; None if there is none."""
        common = set.intersection(*(set(self.steps(rank)) for rank in ranks))
        return max(common, default=None)

    def write(self, rank: int, step: int, parts: Sequence[memoryview], index: bytes) -> None:
        """Put a copy in place of this rank's oldest. index: says what the parts are, which lie one after the other.

        Raises:
            OSError: there is no memory for it; the slot is empty then.
        """
        slot = min(range(SLOTS * rank, SLOTS * (rank + 1)), key=lambda slot: self._words[_WORDS * slot])
        self._words[_WORDS * slot] = _NOTHING
        offset = 0
        for part in (*parts, memoryview(index)):
            offset = write_at(self._files[slot], part, offset)
        self._words[_WORDS * slot + 1], self._words[_WORDS * slot + 2] = offset - len(index), offset
        self._words[_WORDS * slot] = step

    def index(self, rank: int, step: int) -> bytes:
        slot = self.steps(rank)[step]
        start, stop = self._words[_WORDS * slot + 1], self._words[_WORDS * slot + 2]
        return os.pread(self._files[slot], stop - start, start)

    def read_into(self, rank: int, step: int, offset: int, target: memoryview) -> None:
        """Fill the target from this rank's copy, from a place in it on."""
        read_at(self._files[self.steps(rank)[step]], target, offset)

    def keep(self, rank: int, *, until: int | None) -> None:
        """Forget this rank's copies of later steps; all of them for None."""
        for slot in range(SLOTS * rank, SLOTS * (rank + 1)):
            if until is None or self._words[_WORDS * slot] > until:
                self._words[_WORDS * slot] = _NOTHING
