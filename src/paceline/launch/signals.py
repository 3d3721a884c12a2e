"""Signals that ask a process to stop, handled or held back while a block runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # by which schedulers want a machine back
STOPPING = (signal.SIGINT, *PREEMPTING)


@contextmanager
def handled(numbers: Sequence[signal.Signals], handle: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, these signals call `handle(number)`. Only in the main thread: elsewhere they are the
    caller's business, and nothing is changed."""
    def call(number: int, frame: Any) -> None:
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
    """Keep requests to stop until the block ends: a fork must not meet one with its parent's handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
