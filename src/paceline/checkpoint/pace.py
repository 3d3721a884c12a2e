"""Limits how fast a checkpoint is written while CPU ranks need the cores for their steps."""

from __future__ import annotations

import math
import threading
import time

# Of a core's time, on each rank that writes. A GB takes 0.4 s of it, and delays of all ranks add up
# where they wait for each other: when it took 0.86 s and was written at once, by a nice thread, the
# steps of two ranks on two cores were 1.10 to 1.15 times as long.
SHARE = 1 / 16


class Pace:
    """Pauses between buffers, so that a thread takes at most `SHARE` of a core until somebody waits
    for it.

    Args:
        num_bytes: Bytes to write.
        within_s: Seconds within which the bytes should be written. If the writing is later than
            that, it makes no pauses.
        hurry: Set when somebody waits. From then on there are no pauses.
    """

    def __init__(self, num_bytes: int, within_s: float, hurry: threading.Event) -> None:
        self.bytes_per_s = num_bytes / within_s if within_s > 0 else math.inf
        self.hurry, self.num_bytes = hurry, 0
        self.began_s, self.used_s = time.monotonic(), time.thread_time()

    def wrote(self, num_bytes: int) -> None:
        """Pause after writing so many bytes, in proportion to the core time that they took."""
        self.num_bytes += num_bytes
        spare_s = self.num_bytes / self.bytes_per_s - (time.monotonic() - self.began_s)
        used_s = time.thread_time()
        if spare_s > 0:
            self.hurry.wait(min((used_s - self.used_s) * (1 / SHARE - 1), spare_s))
        self.used_s = used_s
