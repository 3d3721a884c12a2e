"""A barrier of CPU ranks on one host, in memory that all of them map.

An all-reduce passes through gloo's threads and sockets. A rank that waits for it lets its core
sleep, and on a virtual machine a sleeping core continues only when the host has time for it. On two
cores, with other guests on the host, an all-reduce of one number took 1.5 to 2.8 ms after both
ranks had called it. Ranks that poll each other's counters stay awake.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait

from paceline.base.errors import PeerLost
from paceline.base.waiting import waiting

# Size of the largest tensor that is exchanged with one wait: each rank combines all of them.
SMALL_BYTES = 2**16
# A waiting rank that has a core of its own keeps it awake for AWAKE_S. After that it sleeps before it
# reads the counters again, LOOK_EVERY_S at first and twice as long each time, up to LONGEST_S. It
# checks its peers' processes every CHECK_EVERY_S.
AWAKE_S, LOOK_EVERY_S, LONGEST_S, CHECK_EVERY_S = 5e-3, 1e-4, 2e-3, 0.1
# Processors that show writes in order. Others may show a counter before the data that was written
# earlier.
_ORDERED = frozenset(("x86_64", "AMD64"))


def is_possible() -> bool:
    """Whether ranks of this machine can wait for each other by counters.

    The machine must show writes in order, and must report when another process ends.
    """
    if platform.machine() not in _ORDERED:
        return False
    # This fails on an old kernel, in a container that forbids it, and outside Linux.
    with suppress(OSError, AttributeError):
        os.close(os.pidfd_open(os.getpid()))
        return True
    return False


class SharedBarrier:
    """A barrier at which each rank counts its arrivals where all others can read them.

    Args:
        counters: One counter per rank: 8 bytes that every rank maps, zero at first.
        processes: The process number of each rank.
        rank: This rank's number among them.
        awake_s: How long a waiting rank keeps its core awake.
        timeout_s: How long it waits at most.

    Raises:
        PeerLost: the process of a rank ended.
    """

    def __init__(
        self,
        counters: Sequence[memoryview],
        processes: Sequence[int],
        rank: int,
        *,
        awake_s: float,
        timeout_s: float,
    ) -> None:
        self._counters = [counter.cast("Q") for counter in counters]
        self._awake_s, self._timeout_s = awake_s, timeout_s
        self._rank, self._arrivals = rank, 0
        self._processes: dict[int, int] = {}  # rank by the descriptor of its process
        for number, process in enumerate(processes):
            if number != rank:
                try:
                    self._processes[os.pidfd_open(process)] = number
                except ProcessLookupError:
                    raise self.loss(self._ended) from None

    def wait(self) -> None:
        """Wait until all ranks have arrived. Collective.

        Raises:
            PeerLost: the process of a rank ended before it arrived, or it took too long.
        """
        self._arrivals += 1
        self._counters[self._rank][0] = self._arrivals
        if self._are_all_here():
            return
        with waiting:
            began_s = time.perf_counter()
            while time.perf_counter() < began_s + self._awake_s:
                if self._are_all_here():
                    return
                os.sched_yield()
                time.sleep(0)  # releases the interpreter lock
            look_s, check_s = LOOK_EVERY_S, 0.0
            while not self._are_all_here():
                if (now_s := time.perf_counter()) >= check_s:
                    self._check()
                    if now_s > began_s + self._timeout_s:
                        raise self.loss(f"another rank did not come within {self._timeout_s:.0f} s")
                    check_s = now_s + CHECK_EVERY_S
                time.sleep(look_s)
                look_s = min(2 * look_s, LONGEST_S)

    def _are_all_here(self) -> bool:
        return all(counter[0] >= self._arrivals for counter in self._counters)

    def _check(self) -> None:
        ended = [self._processes[descriptor] for descriptor in wait(self._processes, 0)]  # type: ignore[index]
        if any(self._counters[rank][0] < self._arrivals for rank in ended):
            raise self.loss(self._ended)

    @property
    def _ended(self) -> str:
        return f"another rank of the {len(self._counters)} that share memory ended"

    def loss(self, message: str) -> PeerLost:
        """Make the error of a rank that cannot continue because of another one.

        The error is marked, because the other rank's own error may say more.
        """
        return PeerLost(message, heard=True)

    def __del__(self) -> None:
        for descriptor in getattr(self, "_processes", ()):
            os.close(descriptor)
