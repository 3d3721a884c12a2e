"""Failures of a run played one by one, as an oracle for the formulas of `simulate/failures.py`."""

from __future__ import annotations

import heapq
import math
import random
from typing import Literal

from paceline.simulate.failures import NOTHING_LOST, Failures
from paceline.simulate.outages import Outages

Event = Literal["lost", "back"]


def simulated_goodput(
    failures: Failures,
    interval_s: float,
    outages: Outages = NOTHING_LOST,
    *,
    num_failures: int = 10_000,
    seed: int = 0,
) -> float:
    """`goodput` played through so many failures, each drawn from an exponential distribution: units are lost, by chance
    also during restarts and while others are out, and are back after their repair."""
    units = _Units(failures, outages, random.Random(seed))
    segment_s, done_s = interval_s + failures.waited_s, 0.0
    while units.num_failures < num_failures:
        if units.lacking > outages.most_lacking:
            units.rest()
            units.start(outages.resumed_s, again_s=outages.resumed_s)
            continue
        speed = outages.speeds[units.lacking]
        lasted_s, event = units.passed(math.inf)
        if event == "back":  # saved at the end of a step, and begun again with it
            whole, rest_s = divmod(lasted_s, segment_s)
            done_s += speed * (whole * interval_s + min(rest_s, interval_s))
            units.start(outages.joining_s, again_s=failures.restart_s)
        else:  # back to the last checkpoint that is written
            done_s += speed * interval_s * max(0.0, (lasted_s - failures.beside_s) // segment_s)
            units.start(failures.restart_s, again_s=failures.restart_s)
    return done_s / units.now_s


class _Units:
    """The units of a run and its spares, as time passes.

    backs_s: when those that are out are back, the first one first.
    """

    def __init__(self, failures: Failures, outages: Outages, draws: random.Random) -> None:
        self.outages, self.draws = outages, draws
        self.unit_mtbf_s = failures.mtbf_s * outages.num_units
        self.num_all = outages.num_units + outages.num_spares
        self.now_s, self.num_failures = 0.0, 0
        part = outages.part_out(failures.mtbf_s)
        self.backs_s = [
            outages.repair_s * draws.random() for _ in range(self.num_all) if draws.random() < part
        ]
        heapq.heapify(self.backs_s)

    @property
    def lacking(self) -> int:
        """Units that the run lacks."""
        return max(0, len(self.backs_s) - self.outages.num_spares)

    def passed(self, most_s: float) -> tuple[float, Event | None]:
        """Let so much time pass, or less: until a unit that the run computes on is lost, or one that it lacks is
        back."""
        began_s, end_s = self.now_s, self.now_s + most_s
        while True:
            num_up = self.num_all - len(self.backs_s)
            lost_s = (
                self.now_s + self.draws.expovariate(num_up / self.unit_mtbf_s)
                if num_up
                else math.inf
            )
            back_s = self.backs_s[0] if self.backs_s else math.inf
            if end_s <= min(lost_s, back_s):
                self.now_s = end_s
                return most_s, None
            self.now_s = min(lost_s, back_s)
            if back_s <= lost_s:
                was_lacking = self.lacking > 0
                heapq.heappop(self.backs_s)
                if was_lacking:
                    return self.now_s - began_s, "back"
                continue
            self.num_failures += 1
            is_of_run = self.draws.random() * num_up < self.outages.num_units
            if self.outages.repair_s > 0:
                heapq.heappush(self.backs_s, self.now_s + self.outages.repair_s)
            if is_of_run:
                return self.now_s - began_s, "lost"

    def start(self, seconds: float, *, again_s: float) -> None:
        """Let ranks start, which takes so long, or longer if units are lost meanwhile. It ends early if too few are
        left."""
        while True:
            lasted_s, event = self.passed(seconds)
            if event is None or self.lacking > self.outages.most_lacking:
                return
            seconds = again_s if event == "lost" else seconds - lasted_s

    def rest(self) -> None:
        """Let time pass until there are enough units again."""
        while self.lacking > self.outages.most_lacking:
            self.passed(math.inf)
