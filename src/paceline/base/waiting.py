"""Marks of a rank that it waits for others.

The watchdog of a hanging run looks at every rank's main thread, because a rank that waits for
others is not the one that hangs. It recognises a collective of torch on the stack. All other waits
mark themselves:

    with waiting:
        work.wait()
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Waiting:
    """The threads of this process that wait. A thread may enter several times."""

    def __init__(self) -> None:
        self._threads: list[int] = []
        # Called with whether the main thread waits, by that thread alone: a call by another thread
        # could be late.
        self.tell: Callable[[bool], None] = lambda waits: None

    def __enter__(self) -> None:
        self._threads.append(threading.get_ident())
        self._tell()

    def __exit__(self, *error: Any) -> None:
        self._threads.remove(threading.get_ident())
        self._tell()

    def __contains__(self, thread: int | None) -> bool:
        """Whether a thread waits, which is given by its ident."""
        return thread in self._threads

    def _tell(self) -> None:
        if (thread := threading.get_ident()) == threading.main_thread().ident:
            self.tell(thread in self._threads)


waiting = Waiting()
