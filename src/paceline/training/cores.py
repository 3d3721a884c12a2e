"""Measures how long this rank was ready to compute but had no core, because other processes used
all of them.
"""

from __future__ import annotations

from pathlib import Path

_SCHEDULED = Path("/proc/self/schedstat")


class CoreWait:
    """The time for which the process's main thread, which computes, has waited for a core since
    this was made.

    Only Linux reports it. On other systems it is 0.

    Source: proc(5), Linux's Documentation/scheduler/sched-stats.rst: the second number, in
    nanoseconds.
    """

    def __init__(self) -> None:
        self._before_ns = _waited_ns()

    @property
    def ns(self) -> int:
        return _waited_ns() - self._before_ns

    @property
    def seconds(self) -> float:
        return 1e-9 * self.ns


def _waited_ns() -> int:
    try:
        return int(_SCHEDULED.read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without these figures
        return 0
