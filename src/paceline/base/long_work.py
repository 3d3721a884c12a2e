"""Signs of a rank that a long piece of its work makes progress.

A rank that gives no sign of life for `--timeout` seconds is taken for hung. Reading or writing a
checkpoint can take longer than that, so code that does it gives a sign after each part:

    for part in parts:
        file.write(part)
        long_work.advanced()

Work that hangs gives no sign, so the watch still finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.base.waiting import waiting


class LongWork:
    """The signs of this process's main thread.

    Signs of another thread count only while the main thread waits for other ranks. At other times
    the main thread may hang while the other thread makes progress.
    """

    def __init__(self) -> None:
        self.tell: Callable[[], None] = lambda: None  # called after each part

    def advanced(self) -> None:
        """Give the sign that a part is done."""
        if threading.current_thread() is threading.main_thread() or waiting.depth:
            self.tell()


long_work = LongWork()
