"""A rank's own word that a long piece of its work goes on.

A rank is taken for hung if it gives no sign of life for the patience (`--patience`). Reading or writing a checkpoint
can take longer than that. Whoever does it says after each part that it came further:

    for part in parts:
        file.write(part)
        long_work.advanced()

Work that stops gives no sign, so the watch finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.waiting import waiting


class LongWork:
    """What this process's main thread says of its work. Other threads are heard while it waits alone: else it may hang
    meanwhile.

    tell: called after each part.
    """

    def __init__(self) -> None:
        self.tell: Callable[[], None] = lambda: None

    def advanced(self) -> None:
        """A part is done."""
        main = threading.main_thread()
        if threading.current_thread() is main or main.ident in waiting:
            self.tell()


long_work = LongWork()
