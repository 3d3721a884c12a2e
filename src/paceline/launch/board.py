"""Signs of life: which step and phase every local rank is in, in memory that outlives any of them."""

from __future__ import annotations

import mmap
import struct
import threading
import time
from dataclasses import dataclass

PHASES = ("start", "build", "restore", "input", "forward", "backward", "reduce", "optimizer", "evaluate", "save", "end")
_ENTRY = struct.Struct("<qqd")


@dataclass(frozen=True, slots=True)
class Sign:
    """A rank's last sign of life. step: the one in progress, from 1; 0 before the first."""

    step: int
    phase: str
    time_s: float

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.step else f"start ({self.phase})"


class Board:
    """One entry a rank in an anonymous shared mapping, inherited by forked ranks; only its rank writes an entry.

    over: set in the parent once the ranks have ended.
    forkable: held in the parent while a thread of it computes, for a fork would inherit locks that nobody opens.
    """

    def __init__(self, num_ranks: int) -> None:
        self.over = False
        self.forkable = threading.Lock()
        self._memory = mmap.mmap(-1, _ENTRY.size * num_ranks)
        for rank in range(num_ranks):
            self.write(rank, 0, "start")

    def write(self, rank: int, step: int, phase: str) -> None:
        _ENTRY.pack_into(self._memory, rank * _ENTRY.size, step, PHASES.index(phase), time.monotonic())

    def read(self, rank: int) -> Sign:
        step, phase, time_s = _ENTRY.unpack_from(self._memory, rank * _ENTRY.size)
        return Sign(step, PHASES[phase], time_s)
