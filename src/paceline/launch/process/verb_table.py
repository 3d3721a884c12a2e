"""Which verbs of a step of one's own each local rank has called, in memory that outlives each rank."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from paceline.base.temporary import open_own

_STEPS = 2  # of each rank that are kept: a rank may have begun the next one when another fails
_STEP_BYTES, _TEXT_BYTES = (
    8,
    1016,
)  # of an entry: its step, and its verbs; more verbs than fit are left out


def shared_memory(size: int, path: Path | None) -> mmap.mmap:
    """Memory of zeros that processes share: those that map the file or, without one, forks of this process."""
    if path is None:
        return mmap.mmap(-1, size)
    file = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(file, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


class VerbTable:
    """The verbs of the last two steps of each rank, one a line; only its rank writes them.

    A verb is noted before its collectives, so a rank that fails on another's message finds that rank's verb here.
    """

    def __init__(self, num_ranks: int, path: Path | None = None) -> None:
        """
        Args:
            path: Of a file that the ranks share; without one, those that are forked from this process share its memory.
        """
        self.num_ranks = num_ranks
        self._memory = shared_memory(num_ranks * _STEPS * (_STEP_BYTES + _TEXT_BYTES), path)

    def note(self, rank: int, step: int, verb: str) -> None:
        """Rank `rank` calls `verb` in step `step`, counted from 1."""
        start, text = self._start(rank, step), self._text(rank, step) + f"{verb}\n".encode()
        if len(text) <= _TEXT_BYTES:
            self._memory[start : start + _STEP_BYTES] = step.to_bytes(_STEP_BYTES, "little")
            self._memory[start + _STEP_BYTES : start + _STEP_BYTES + _TEXT_BYTES] = text.ljust(
                _TEXT_BYTES, b"\0"
            )

    def of(self, rank: int, step: int) -> list[str]:
        """The verbs that a rank has called in a step; none if the step is not kept."""
        return self._text(rank, step).decode(errors="replace").split("\n")[:-1]

    def _text(self, rank: int, step: int) -> bytes:
        start = self._start(rank, step)
        if int.from_bytes(self._memory[start : start + _STEP_BYTES], "little") != step:
            return b""
        return self._memory[start + _STEP_BYTES : start + _STEP_BYTES + _TEXT_BYTES].rstrip(b"\0")

    def mismatch(self, rank: int, step: int) -> str:
        """Which other verb another rank called in the place of this rank's, in words; "" if none did."""
        verbs = self.of(rank, step)
        for other in range(self.num_ranks):
            for number, (verb, other_verb) in enumerate(
                zip(verbs, self.of(other, step), strict=False), start=1
            ):
                if verb != other_verb:
                    return (
                        f"ranks call different verbs in step {step}: as number {number}, rank {rank} came to "
                        f"{verb} and rank {other} to {other_verb}"
                    )
        return ""

    def _start(self, rank: int, step: int) -> int:
        return (rank * _STEPS + step % _STEPS) * (_STEP_BYTES + _TEXT_BYTES)
