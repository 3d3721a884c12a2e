"""A rank's own word that a long piece of its work goes on.

A rank is taken for hung if it gives no sign of life for the patience (`--patience`). Reading or writing a checkpoint
can take longer than that. Whoever does it says after each part that it came further:

    for part in parts:
        file.write(part)
        long_work.advanced()

What stops on its way says nothing, and is found.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class LongWork:
    """What this process's main thread says of its work. Other threads are not heard, as it may hang meanwhile.

    tell: called after each part.
    """

    def __init__(self) -> None:
        self.tell: Callable[[], None] = lambda: None

    def advanced(self) -> None:
        """A part is done."""
        if threading.current_thread() is threading.main_thread():
            self.tell()


long_work = LongWork()
