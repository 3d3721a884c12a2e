"""Measure what a part of a plan gains: a calibration runs steps with it and without it in turns."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.planner.break_even import Gain

if TYPE_CHECKING:
    from paceline.training.state import StateOwner

WARM_UP_PAIRS = 2  # the first pair compiles code, the second one finds memory
FEWEST_PAIRS = 6  # the least number for which an interval of 95 % exists
# No further steps are taken once half the width of a gain's interval is below this part of the
# gain.
PRECISE = 0.1
NORMAL_95 = 1.96  # standard deviations of a normal distribution to each side of its middle 95 %


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """The duration of a step in seconds."""

    clock_s: float  # by the clock
    computed_s: float  # CPU time of all threads of this process and of its compilers together


@dataclass(frozen=True, slots=True)
class Pair:
    """Two consecutive steps: one with the whole plan, and one without a part of it."""

    with_all: StepSeconds
    without: StepSeconds

    @property
    def computed_s(self) -> float:
        return self.with_all.computed_s + self.without.computed_s

    @property
    def gain_s(self) -> float:
        return self.without.computed_s - self.with_all.computed_s


class AlternatingSteps:
    """Observe a run and switch the optional synchronisers on and off in turns.

    These are the synchronisers that a step can leave out. The first step uses them, the second one
    does not, and so on.
    """

    def __init__(self) -> None:
        self._rooms: list[Any] = []
        self._began = StepSeconds(0.0, 0.0)
        self._steps: list[StepSeconds] = []

    def initial(self, stepper: StateOwner) -> None:
        from paceline.strategies.compose import Switched

        self._rooms = [
            synchroniser
            for synchroniser in stepper.synchronisers
            if isinstance(synchroniser, Switched)
        ]

    def samples(self, step: int, batches: Any) -> None:
        for room in self._rooms:
            room.switch(on=len(self._steps) % 2 == 0)
        self._began = _now()

    def gradients(self, step: int, stepper: StateOwner) -> None:
        """Do nothing: the timing needs no gradients."""

    def weights(self, step: int, stepper: StateOwner, loss: float) -> None:
        ended, began = _now(), self._began
        self._steps.append(
            StepSeconds(ended.clock_s - began.clock_s, ended.computed_s - began.computed_s)
        )

    def pairs(self) -> list[Pair]:
        """Return the pairs of steps so far; none if a step can leave nothing out."""
        steps = self._steps if self._rooms else []
        return [Pair(*steps) for steps in zip(steps[::2], steps[1::2], strict=False)]


def start_s(pairs: Sequence[Pair]) -> float:
    """Return how many seconds longer the first pair of steps takes than the others.

    >>> warm = [Pair(StepSeconds(1.0, 1.0), StepSeconds(1.5, 1.5))] * 4
    >>> start_s([Pair(StepSeconds(21.0, 21.0), StepSeconds(1.5, 1.5)), *warm])
    20.0
    """
    return max(
        0.0,
        pairs[0].computed_s - statistics.median(pair.computed_s for pair in pairs[WARM_UP_PAIRS:]),
    )


def gain(warm: Sequence[Pair]) -> Gain:
    """Return what a step gains, with its 95 % interval.

    The gain is the median of the means of any two pairs' gains. It is measured in CPU time, because
    other users of the machine hardly change that. Threads that compute side by side share a gain. A
    process that waits for others has less CPU time than clock time, and gains no more than its CPU
    time says.

    Source: Hodges and Lehmann 1963, with the interval of Wilcoxon's signed-rank test. On noise that
    is nearly normal, this interval needs two thirds of the pairs to be as narrow as the median's.

    >>> pairs = [Pair(StepSeconds(0.8, 1.5), StepSeconds(1.0, 2.0)), Pair(StepSeconds(0.8, 1.4), StepSeconds(1.0, 2.0))]
    >>> step_gain = gain(pairs * 8)
    >>> round(step_gain.seconds, 3), round(step_gain.low_s, 3), round(step_gain.high_s, 3)
    (0.275, 0.25, 0.3)
    """
    side_by_side = min(
        1.0, statistics.median(pair.without.clock_s / pair.without.computed_s for pair in warm)
    )
    gains = [side_by_side * pair.gain_s for pair in warm]
    means = sorted(
        (gain_s + other_s) / 2 for k, gain_s in enumerate(gains) for other_s in gains[k:]
    )
    count = len(gains)
    expected, spread = (
        count * (count + 1) / 4,
        math.sqrt(count * (count + 1) * (2 * count + 1) / 24),
    )
    outside = max(0, math.floor(expected - NORMAL_95 * spread))
    return Gain(statistics.median(means), means[outside], means[-1 - outside], count)


def more_pairs(warm: Sequence[Pair]) -> int:
    """Return how many more pairs are needed until the gain is known precisely.

    The number is 0 if the gain is known already, or if the pairs show no gain.
    """
    warm_gain = gain(warm)
    if warm_gain.seconds <= 0:
        return 0
    wide = (warm_gain.high_s - warm_gain.low_s) / 2 / (PRECISE * warm_gain.seconds)
    return max(0, math.ceil(len(warm) * (wide**2 - 1)))


def _now() -> StepSeconds:
    """Return the clock time, and the CPU time of this process and of ended child processes such as
    compilers.
    """
    times = os.times()
    return StepSeconds(
        time.perf_counter(), time.process_time() + times.children_user + times.children_system
    )
