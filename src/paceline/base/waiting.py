"""Marks of a rank that it waits for others.

The watch of a hanging run looks at every rank's main thread, because a rank that waits for
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
    """Whether the main thread waits. Other threads' waits say nothing of a rank.

    depth: how often the main thread has entered.
    """

    def __init__(self) -> None:
        self.depth = 0
        # Called by the main thread with whether it waits.
        self.tell: Callable[[bool], None] = lambda waits: None

    def __enter__(self) -> None:
        self._count(1)

    def __exit__(self, *error: Any) -> None:
        self._count(-1)

    def _count(self, change: int) -> None:
        if threading.current_thread() is threading.main_thread():
            self.depth += change
            self.tell(self.depth > 0)


waiting = Waiting()
