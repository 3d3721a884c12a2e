"""Heartbeats: the step and phase of every local rank, in memory that outlives each rank; and signs of life beside work
that gives none."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.base.temporary import open_own
from paceline.launch.process.memory_files import memory_file

PHASES = (
    "start",
    "build",
    "restore",
    "input",
    "forward",
    "backward",
    "reduce",
    "optimizer",
    "evaluate",
    "save",
    "copy",
    "callback",
    "end",
    "train",  # those of Keras
    "test",
    "predict",
    "compare",
)
# Of an entry: where its rank is, when it said so, whether it waits for others, whether its process died, which process
# it is, and when it last looked at the other ranks of its host.
_WORDS, _WORD_BYTES = 6, 8
_TURN_S = 5.0  # without a look, after which another rank of the host has its turn


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank's last sign of life. step: the one in progress, from 1; 0 before the first."""

    step: int
    phase: str
    time_s: float

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.step else f"start ({self.phase})"


class HeartbeatTable:
    """One entry a rank in memory that forked ranks inherit, or in files. Only its rank writes an entry, but for
    the word that the rank's process died, which is its parent's.

    Others read it at any moment, so each word is written at once. (struct.pack_into first clears what it will write: a
    reader met times of 0, and a healthy rank was taken for one that had been silent since the machine started.)

    One word more says whether the ranks have ended. Beside the table, each rank has a file for its stack.
    """

    def __init__(self, num_ranks: int, path: Path | None = None) -> None:
        """
        Args:
            path: Of the file, in which only ranks that have begun have entries.
        """
        self.num_ranks = num_ranks
        self._words = memoryview(_memory((_WORDS * num_ranks + 1) * _WORD_BYTES, path)).cast("q")
        self._files, self._stacks = [] if path is None else [path], dict[int, int]()
        for rank in range(num_ranks) if path is None else ():
            self.write(rank, 0, "start")

    @classmethod
    def of_launch(cls, attempt: str, num_ranks: int) -> HeartbeatTable:
        """The table of ranks that somebody else started on this host; each of them opens it, and `remove`s it at its
        end. attempt: names their launch. Where a file is another user's, each rank sees its own entry alone."""
        try:
            return cls(num_ranks, Path(tempfile.gettempdir()) / f"paceline-signs-{attempt}")
        except OSError:
            return cls(num_ranks)

    def remove(self) -> None:
        """Take the files away; who has opened them still reads and writes the table."""
        for path in self._files:
            path.unlink(missing_ok=True)

    @property
    def is_shared(self) -> bool:
        """Whether it lies in files, for ranks that are no forks of one process."""
        return bool(self._files)

    def stack(self, rank: int) -> int:
        """The descriptor of the file of a rank's stack. Forks share those that were asked for before."""
        if rank not in self._stacks:
            self._stacks[rank] = stack = self._open_stack(rank)
            weakref.finalize(self, os.close, stack)
            fcntl.fcntl(stack, fcntl.F_SETFL, os.O_APPEND)  # the end is moved by who reads
        return self._stacks[rank]

    def _open_stack(self, rank: int) -> int:
        if self.is_shared:
            path = Path(f"{self._files[0]}-stack-{rank}")
            with suppress(OSError):  # another user's: others see no stack of this rank
                stack = open_own(path, os.O_RDWR | os.O_CREAT)
                self._files.append(path)
                return stack
        return memory_file("paceline-stack")

    @property
    def over(self) -> bool:
        """Whether the ranks have ended; set by their parent."""
        return bool(self._words[-1])

    @over.setter
    def over(self, is_over: bool) -> None:
        self._words[-1] = is_over

    def write(self, rank: int, step: int, phase: str) -> None:
        self._words[_WORDS * rank] = step * len(PHASES) + PHASES.index(phase)
        self._words[_WORDS * rank + 1] = time.monotonic_ns()

    def renew(self, rank: int) -> None:
        """The rank goes on with what it wrote last; see `long_work.py`."""
        self._words[_WORDS * rank + 1] = time.monotonic_ns()

    def set_waits(self, rank: int, waits: bool) -> None:
        """A rank's own word that its main thread waits for others; see `waiting.py`."""
        self._words[_WORDS * rank + 2] = waits

    def waits(self, rank: int) -> bool:
        return bool(self._words[_WORDS * rank + 2])

    def set_process(self, rank: int, pid: int) -> None:
        """A rank's own word which process it is; 0 at its end."""
        self._words[_WORDS * rank + 4] = pid

    def process(self, rank: int) -> int:
        return self._words[_WORDS * rank + 4]

    def note_look(self, rank: int) -> None:
        """A rank can look at the others of its host."""
        self._words[_WORDS * rank + 5] = time.monotonic_ns()

    def can_look(self, rank: int) -> bool:
        """Whether a rank that has not ended could look at the others a moment ago."""
        looked_s = 1e-9 * self._words[_WORDS * rank + 5]
        return bool(self.process(rank)) and time.monotonic() - looked_s < _TURN_S

    def set_died(self, rank: int, died: bool) -> None:
        """The parent's word that a rank's process ended before the rank said so."""
        self._words[_WORDS * rank + 3] = died

    @property
    def dead(self) -> list[int]:
        """The ranks that died, in their order."""
        return [rank for rank in range(self.num_ranks) if self._words[_WORDS * rank + 3]]

    def read(self, rank: int) -> Heartbeat:
        step, phase = divmod(self._words[_WORDS * rank], len(PHASES))
        return Heartbeat(step, PHASES[phase], 1e-9 * self._words[_WORDS * rank + 1])


def _memory(size: int, path: Path | None) -> mmap.mmap:
    """Memory of zeros that processes share: those that map the file or, without one, forks of this process."""
    if path is None:
        return mmap.mmap(-1, size)
    file = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(file, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


@contextmanager
def signs_of_life(give: Callable[[], None], *, every_s: float) -> Iterator[None]:
    """Call `give()` in a thread at this interval while the block runs; its end waits for a call that has begun."""
    is_over = threading.Event()

    def give_all() -> None:
        while not is_over.wait(every_s):
            give()

    thread = threading.Thread(target=give_all, name="paceline-signs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
