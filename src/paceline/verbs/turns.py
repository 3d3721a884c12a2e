"""Steps of a rehearsal that run with and without a part of the plan, in turns: what that part gains."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.runtime.state import StateOwner

WARM_UP_PAIRS = 2  # code is compiled in the first, and memory is found in the second


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step: by the clock, and of all threads of this process and its compilers together."""

    clock_s: float
    computed_s: float


@dataclass(frozen=True, slots=True)
class Brought:
    """gain_s: by which a step is shorter. start_s: that the first pair of steps takes longer than the others."""

    gain_s: float
    start_s: float


class AlternatingSteps:
    """Observes a run: rooms that can be left out of a step are in the first, out of the second, and so on."""

    def __init__(self) -> None:
        self._rooms: list[Any] = []
        self._began = StepSeconds(0.0, 0.0)
        self._steps: list[StepSeconds] = []

    def initial(self, stepper: StateOwner) -> None:
        from paceline.strategies.compose import Switched

        self._rooms = [synchroniser for synchroniser in stepper.synchronisers if isinstance(synchroniser, Switched)]

    def samples(self, step: int, batches: Any) -> None:
        for room in self._rooms:
            room.switch(on=len(self._steps) % 2 == 0)
        self._began = _now()

    def gradients(self, step: int, stepper: StateOwner) -> None:
        """Nothing is looked at."""

    def weights(self, step: int, stepper: StateOwner, loss: float) -> None:
        ended, began = _now(), self._began
        self._steps.append(StepSeconds(ended.clock_s - began.clock_s, ended.computed_s - began.computed_s))

    def brought(self) -> Brought | None:
        """None if there are no such rooms, or too few steps."""
        return brought(self._steps) if self._rooms and len(self._steps) >= 2 * (WARM_UP_PAIRS + 1) else None


def brought(steps: Sequence[StepSeconds]) -> Brought:
    """
    What was computed counts, the median over pairs: others that use the machine make hardly any difference to it.
    Threads that compute side by side share a gain; a process that waits for others computes less than the clock says,
    and gains no more.

    >>> seconds = [(21.0, 22.0), (1.0, 2.0), *[(9.0, 9.0)] * 2, *[(0.8, 1.5), (1.0, 2.0)] * 3]
    >>> brought([StepSeconds(*taken) for taken in seconds])
    Brought(gain_s=0.25, start_s=20.5)
    """
    pairs = list(zip(steps[::2], steps[1::2], strict=False))
    warm = pairs[WARM_UP_PAIRS:]
    gain_s = statistics.median(without.computed_s - with_all.computed_s for with_all, without in warm)
    side_by_side = min(1.0, statistics.median(without.clock_s / without.computed_s for _, without in warm))
    later_s = statistics.median(_computed_s(pair) for pair in warm)
    return Brought(gain_s * side_by_side, max(0.0, _computed_s(pairs[0]) - later_s))


def _computed_s(pair: tuple[StepSeconds, StepSeconds]) -> float:
    return pair[0].computed_s + pair[1].computed_s


def _now() -> StepSeconds:
    """Of this process and of those it has started and waited for, as compilers."""
    times = os.times()
    return StepSeconds(time.perf_counter(), time.process_time() + times.children_user + times.children_system)
