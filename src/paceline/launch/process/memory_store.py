"""Memory that outlives the ranks of a launch: ranks leave copies of their state there, and their successors read it.

The memory belongs to files without a name (`memory_files.py`), which the launching process makes before it forks. The
kernel frees them with the last process of the launch, however that ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable
from itertools import chain

from paceline.launch.process.memory_files import memory_file, read_at, write_at

PIECE_BYTES = 8 * 2**20  # of what comes from elsewhere, held at a time
TIME_SHARE = 0.01  # of the time of the steps, spent on copies
SLOTS = 2  # a rank: one keeps the last content while the next one is written into the other
_WORDS, _WORD_BYTES = 3, 8  # of a slot: the step it is of, and where its index begins and ends
NOTHING = -1  # in place of a step


class StateCopies:
    """Each rank's last copies: two slots a rank, or more. A slot's step is written last and cleared first, so what has
    a step is whole.

    num_slots: of a rank; those beyond two are for steps that have to stay.
    """

    def __init__(self, num_ranks: int, *, num_slots: int = SLOTS) -> None:
        self.num_ranks, self.num_slots = num_ranks, num_slots
        self._files = [memory_file("paceline-state") for _ in range(num_slots * num_ranks)]
        self._words = memoryview(mmap.mmap(-1, _WORDS * _WORD_BYTES * len(self._files))).cast("q")
        for rank in range(num_ranks):
            self.keep(rank, until=None)

    def close(self) -> None:
        for descriptor in self._files:
            os.close(descriptor)

    def steps(self, rank: int) -> dict[int, int]:
        """This rank's slots, by the step that each is of."""
        steps = {self._words[_WORDS * slot]: slot for slot in self._slots(rank)}
        return {step: slot for step, slot in steps.items() if step != NOTHING}

    def newest(self, ranks: Iterable[int]) -> int | None:
        """The last step of which each of these ranks has a copy; None if there is none."""
        return max(set.intersection(*(set(self.steps(rank)) for rank in ranks)), default=None)

    def _slots(self, rank: int) -> range:
        return range(self.num_slots * rank, self.num_slots * (rank + 1))

    def write(
        self,
        rank: int,
        step: int,
        parts: Iterable[memoryview],
        index: bytes,
        *,
        keep: Collection[int] = (),
    ) -> None:
        """Write into this rank's oldest slot. index: says what the parts are, which lie one after the other. keep:
        steps whose slots stay as they are.

        Raises:
            OSError: there is no memory for it; the slot is empty then.
        """
        slot = self._oldest(rank, keep)
        offset = 0
        for part in chain(parts, [memoryview(index)]):
            offset = write_at(self._files[slot], part, offset)
        self._words[_WORDS * slot + 1] = offset - len(index)
        self._words[_WORDS * slot + 2] = offset
        self._words[_WORDS * slot] = step

    def _oldest(self, rank: int, keep: Collection[int] = ()) -> int:
        """This rank's slot with the oldest content, emptied."""
        slots = [
            slot
            for slot in (self._slots(rank) if keep else self._slots(rank)[:SLOTS])
            if self._words[_WORDS * slot] not in keep
        ]
        slot = min(slots, key=lambda slot: self._words[_WORDS * slot])
        self._words[_WORDS * slot] = NOTHING
        return slot

    def num_bytes(self, rank: int) -> int:
        """Memory that this rank's slots take."""
        return sum(os.fstat(self._files[slot]).st_size for slot in self._slots(rank))

    def extent(self, rank: int, step: int) -> tuple[int, int]:
        """Where the index of what this rank wrote after a step begins, and where it ends, as all of it does."""
        slot = self.steps(rank)[step]
        return self._words[_WORDS * slot + 1], self._words[_WORDS * slot + 2]

    def read_into(self, rank: int, step: int, offset: int, target: memoryview) -> None:
        """Fill the target from what this rank wrote after a step, from a place in it on."""
        read_at(self._files[self.steps(rank)[step]], target, offset)

    def keep(self, rank: int, *, until: int | None) -> None:
        """Forget what this rank wrote after later steps; all of it for None."""
        for slot in self._slots(rank):
            if until is None or self._words[_WORDS * slot] > until:
                self._words[_WORDS * slot] = NOTHING

    def give_back(self, rank: int) -> None:
        """Forget all that this rank wrote, and give its memory back."""
        self.keep(rank, until=None)
        for slot in self._slots(rank):
            os.ftruncate(self._files[slot], 0)
