"""Signals that ask a process to stop, handled or held back while a block runs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

PREEMPTING = (
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)  # with which schedulers take a machine back
STOPPING = (signal.SIGINT, *PREEMPTING)
# A signal that comes again within this time is the same request: timeout(1) signals its command and
# then the group that the command is in, and systemd, Slurm and `kill -- -PGID` signal both a
# process and the parent that passes it on.
SAME_REQUEST_S = 0.5


@contextmanager
def handled(numbers: Sequence[signal.Signals], handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle(number)` for these signals while the block runs, once for each request.

    In other threads than the main thread nothing changes, and the caller has to handle signals.
    """
    handled_s: dict[int, float] = {}  # when the last request came by each signal

    def call(number: int, frame: Any) -> None:
        now_s = time.monotonic()
        if number not in handled_s or now_s - handled_s[number] > SAME_REQUEST_S:
            handled_s[number] = now_s
            handle(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, call) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def blocked() -> Iterator[None]:
    """Hold requests to stop back until the block ends, so that no fork handles one with its
    parent's handler.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
