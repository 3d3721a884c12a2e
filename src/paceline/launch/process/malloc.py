"""The C library's heap of a CPU rank: whether it keeps what is freed, and when its holes are given back."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable

import psutil

# How often a rank looks at its resident size; by how much of it that may grow until holes are given back; and the most
# time that giving back may take, as a part. It took 3 to 10 ms for heaps of 200 to 280 MiB, and the pages that a step
# needs again 15 ms; see docs/memory.md.
LOOK_EVERY_S, MOST_GROWTH, TIME_SHARE = 10.0, 0.1, 0.005
# From which on a block has pages of its own, which are new each time: in a heap that keeps what is freed (the greatest
# that glibc's own adjustment comes to), and in one that gives it back.
KEPT_BLOCK_BYTES, GIVEN_BACK_BLOCK_BYTES = 32 * 2**20, 2**20


def set_up_heap(*, keep: bool) -> None:
    """Let glibc keep what a CPU rank frees, for its next step takes as much again; or give all that is large back.

    If the heap is given back after every backward, forward pays for each page anew: 31 of 700 ms a step of the byte
    GPT. A heap that is kept has holes, which a rank with a memory limit can't afford: there each tensor of a MiB or
    more has pages of its own, at the price of new pages in every step. Thresholds that the user set stay.
    """
    if not is_set_by_user():
        with contextlib.suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL("libc.so.6").mallopt
            mallopt(-3, KEPT_BLOCK_BYTES if keep else GIVEN_BACK_BLOCK_BYTES)  # M_MMAP_THRESHOLD
            mallopt(-1, 2**31 - 1 if keep else GIVEN_BACK_BLOCK_BYTES)  # M_TRIM_THRESHOLD


def is_set_by_user() -> bool:
    """Whether the user has chosen how glibc's heap behaves."""
    return any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )


def trim_heap() -> None:
    """Give the system the pages of a heap in which nothing is; nothing where the C library can't."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class HeapTrimmer:
    """Gives holes back once a rank's resident size has grown, so that it does not grow without end.

    The size after a look, while nothing grows, is the usual one. After holes were given back, the next look says it
    anew: a step has taken by then what it needs.
    """

    def __init__(
        self,
        device_kind: str,
        *,
        resident_bytes: Callable[[], int] | None = None,
        trim: Callable[[], None] = trim_heap,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resident_bytes = resident_bytes or (lambda: int(psutil.Process().memory_info().rss))
        self._trim, self._clock = trim, clock
        self._is_kept = device_kind == "cpu" and not is_set_by_user()
        self._usual_bytes: int | None = None
        self._look_s = clock() + LOOK_EVERY_S

    def poll(self) -> None:
        """Look, if it is time and the heap is a CPU rank's whose user has not chosen how it behaves."""
        now_s = self._clock()
        if now_s < self._look_s or not self._is_kept:
            return
        self._look_s = now_s + LOOK_EVERY_S
        resident_bytes = self._resident_bytes()
        if self._usual_bytes is None or resident_bytes < self._usual_bytes:
            self._usual_bytes = resident_bytes
        elif resident_bytes > (1 + MOST_GROWTH) * self._usual_bytes:
            self._trim()
            self._usual_bytes = None
            self._look_s += (self._clock() - now_s) / TIME_SHARE
