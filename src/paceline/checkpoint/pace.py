"""How fast a checkpoint is written beside the steps of CPU ranks, which need the cores themselves."""

from __future__ import annotations

import math
import threading
import time

# Of a core's time, on each rank that writes. A GB takes 0.4 s of it, and delays of all ranks add up where they wait for
# each other: when it took 0.86 s and was written at once, by a nice thread, the steps of two ranks on two cores were
# 1.10 to 1.15 times as long.
SHARE = 1 / 16


class Pace:
    """Pauses between buffers, so that a thread takes at most `SHARE` of a core, until somebody waits for it.

    Args:
        num_bytes: What is to be written.
        within_s: Seconds in which it is to be: there is no pause where that is not kept anyway.
        hurry: Set when somebody waits: there are no pauses any more.
    """

    def __init__(self, num_bytes: int, within_s: float, hurry: threading.Event) -> None:
        self.bytes_per_s = num_bytes / within_s if within_s > 0 else math.inf
        self.hurry, self.num_bytes = hurry, 0
        self.began_s, self.used_s = time.monotonic(), time.thread_time()

    def wrote(self, num_bytes: int) -> None:
        """So many bytes are written: pause for the time of the core that they took."""
        self.num_bytes += num_bytes
        spare_s = self.num_bytes / self.bytes_per_s - (time.monotonic() - self.began_s)
        used_s = time.thread_time()
        if spare_s > 0:
            self.hurry.wait(min((used_s - self.used_s) * (1 / SHARE - 1), spare_s))
        self.used_s = used_s
