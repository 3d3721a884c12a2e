"""A rank's own word that it waits for others.

The watchdog of a hanging run looks at every rank's main thread: a rank that waits is not the one that the others wait
for. A collective of torch can be seen on the stack. All other waits say so themselves:

    with waiting:
        work.wait()
"""

from __future__ import annotations

import threading
from typing import Any


class Waiting:
    """The threads of this process that wait; one may enter several times."""

    def __init__(self) -> None:
        self._threads: list[int] = []

    def __enter__(self) -> None:
        self._threads.append(threading.get_ident())

    def __exit__(self, *error: Any) -> None:
        self._threads.remove(threading.get_ident())

    def __contains__(self, thread: int | None) -> bool:
        """thread: its ident."""
        return thread in self._threads


waiting = Waiting()
