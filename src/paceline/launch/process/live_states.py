"""Memory that outlives the ranks of a launch, and in which they hold their state while they train.

What only updates write to lies in a rank's arena, a file in memory that the rank has mapped. The rest of its state is
copied after each step, as a note. A word says after which step arena and newest note together are the rank's state. It
is cleared before an update begins, so what has a step is whole.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable

from paceline.launch.process.memory_files import memory_file, read_at
from paceline.launch.process.memory_store import DoubleBuffer

# Of the time of the steps, for notes, and for copies (`state_copies.py`) beside them, which are for ranks that are lost
# in an update. Hashing, the journal and the watch have the rest of 1 %.
TIME_SHARE, COPY_SHARE = 0.004, 0.001
_WORD_BYTES = 8
_NOTHING = -1
_LOOK_EVERY_S = 0.005


class LiveStates:
    """An arena and notes a rank.

    is_mapped: whether this process has mapped an arena. It then stays as it is: tensors lie in it.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.is_mapped = num_ranks, False
        self._arenas = [memory_file("paceline-arena") for _ in range(num_ranks)]
        self._notes, self._indexes = (
            DoubleBuffer(num_ranks, "paceline-note"),
            DoubleBuffer(num_ranks, "paceline-index"),
        )
        self._words = memoryview(mmap.mmap(-1, _WORD_BYTES * num_ranks)).cast("q")
        for rank in range(num_ranks):
            self.change(rank)

    def close(self) -> None:
        self._notes.close()
        self._indexes.close()
        for descriptor in self._arenas:
            os.close(descriptor)

    def arena(self, rank: int, num_bytes: int) -> mmap.mmap:
        """This rank's arena, empty and of a size. What was in it is lost. It has no memory yet; see `reserve`."""
        self.forget(rank)
        os.ftruncate(self._arenas[rank], num_bytes)
        self.is_mapped = True
        return mmap.mmap(self._arenas[rank], num_bytes)

    def reserve(self, rank: int, offset: int, num_bytes: int) -> None:
        """Get memory for a part of this rank's arena: without it, a write there would end the process.

        Raises:
            OSError: this host has none.
        """
        os.posix_fallocate(self._arenas[rank], offset, num_bytes)

    def forget(self, rank: int) -> None:
        """Let go of this rank's state, and of its memory if that is not in use."""
        self.change(rank)
        self._notes.give_back(rank)
        self._indexes.give_back(rank)
        if not self.is_mapped:
            os.ftruncate(self._arenas[rank], 0)

    def change(self, rank: int) -> None:
        """This rank is about to change its state."""
        self._words[rank] = _NOTHING

    def describe(self, rank: int, step: int, index: bytes) -> None:
        """From this step on, the index says what lies where in this rank's arena and notes. No note is whole before.

        Raises:
            OSError: there is no memory for it.
        """
        self.change(rank)
        self._indexes.write(rank, step, [], index)

    def note(
        self, rank: int, step: int, note: memoryview, document: bytes, *, is_whole: bool = True
    ) -> None:
        """This rank's state is that after a step. is_whole: whether others may read it.

        Raises:
            OSError: there is no memory for the note; there is no state then.
        """
        self._notes.write(rank, step, [note], document)
        if is_whole:
            self._words[rank] = step

    def step(self, rank: int) -> int | None:
        """After which step this rank's state is whole; None if it is not."""
        step = self._words[rank]
        return None if step == _NOTHING else step

    def index(self, rank: int) -> bytes | None:
        """What lies where in this rank's arena and newest note; None if it has none."""
        steps = self._indexes.steps(rank)
        return self._indexes.index(rank, max(steps)) if steps else None

    def document(self, rank: int) -> bytes:
        """Of this rank's newest note."""
        return self._notes.index(rank, max(self._notes.steps(rank)))

    def read_arena(self, rank: int, offset: int, target: memoryview) -> None:
        """Fill the target from a place in this rank's arena on."""
        read_at(self._arenas[rank], target, offset)

    def read_note(self, rank: int, offset: int, target: memoryview) -> None:
        """Fill the target from a place in this rank's newest note on."""
        self._notes.read_into(rank, max(self._notes.steps(rank)), offset, target)

    def settle(self, running: Iterable[int], *, patience_s: float) -> None:
        """Wait until ranks that still run have their state whole, and of the step of all others: some may be in an
        update, or not yet through with a step that others have ended."""
        running = [rank for rank in running if self.index(rank) is not None]
        until_s = time.monotonic() + patience_s
        while (
            any(self.step(rank) is None for rank in running)
            or len({self.step(rank) for rank in range(self.num_ranks)} - {None}) > 1
        ):
            if not running or time.monotonic() > until_s:
                return
            time.sleep(_LOOK_EVERY_S)
