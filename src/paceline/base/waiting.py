"""A rank's own word that it waits for others.

The watchdog of a hanging run looks at every rank's main thread: a rank that waits is not the one that the others wait
for. A collective of torch can be seen on the stack. All other waits say so themselves:

    with waiting:
        work.wait()
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Waiting:
    """The threads of this process that wait; one may enter several times.

    tell: told whether the main thread waits, by that thread alone; the word of another could be late.
    """

    def __init__(self) -> None:
        self._threads: list[int] = []
        self.tell: Callable[[bool], None] = lambda waits: None

    def __enter__(self) -> None:
        self._threads.append(threading.get_ident())
        self._tell()

    def __exit__(self, *error: Any) -> None:
        self._threads.remove(threading.get_ident())
        self._tell()

    def __contains__(self, thread: int | None) -> bool:
        """thread: its ident."""
        return thread in self._threads

    def _tell(self) -> None:
        if (thread := threading.get_ident()) == threading.main_thread().ident:
            self.tell(thread in self._threads)


waiting = Waiting()
