"""A rank's own word that a long piece of its work goes on.

A rank that gives no sign of life for `--patience` seconds is taken for hung. Reading or writing a checkpoint can take
longer than that. Code that does so gives a sign after each part:

    for part in parts:
        file.write(part)
        long_work.advanced()

Work that stops gives no sign, so the watch finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.base.waiting import waiting


class LongWork:
    """Passes on the signs of the main thread. Those of another thread count only while the main thread waits for other
    ranks: at other times the main thread may hang beside it.

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
