"""Whether the machine is as fast as usual: on a virtual machine, neighbours slow everything down for minutes."""

from __future__ import annotations

import sys
import time

from paceline.base.fork import in_a_fork
from paceline.cluster.limits import usable_cores

# Of the upper quartile of all paces so far: quiet minutes differ by a tenth. The best pace is no measure: it may last
# for a second.
USUAL = 0.85
PROBE_S, WAIT_S, MOST_WAITS = 1.5, 10.0, 12


class Pace:
    """Waits for minutes in which the machine is as fast as it mostly was."""

    def __init__(self) -> None:
        self._paces: list[float] = []

    def is_usual(self) -> bool:
        pace = in_a_fork(_layers_per_s, timeout_s=60.0)
        self._paces.append(pace)
        return bool(pace >= USUAL * sorted(self._paces)[3 * len(self._paces) // 4])

    def wait_until_usual(self) -> None:
        """For some two minutes at most."""
        for _ in range(MOST_WAITS):
            if self.is_usual():
                return
            print("the machine is slower than before: waiting", file=sys.stderr, flush=True)
            time.sleep(WAIT_S)


def _layers_per_s() -> float:
    """Of a small layer and an update's arithmetic, by all cores together."""
    import torch

    torch.set_num_threads(usable_cores())
    inputs, weight, state = torch.ones(128, 512), torch.ones(512, 512), torch.ones(2**20)

    def layers(seconds: float) -> float:
        count, began_s = 0, time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            torch.relu(inputs @ weight)
            state.mul_(0.5)
            count += 1
        return count / (time.perf_counter() - began_s)

    layers(PROBE_S / 5)
    return layers(PROBE_S)
