"""Compute what a part of a plan gains in every step, and after how many steps that pays for its
cost at the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gain:
    """The seconds by which a step is shorter, with their 95 % interval."""

    seconds: float
    low_s: float
    high_s: float
    # pairs of steps, with and without the part, in which the gain was measured; 0 if it is
    # predicted
    num_pairs: int = 0

    @property
    def is_sure(self) -> bool:
        """Whether the whole interval lies above 0."""
        return self.low_s > 0

    def pays_after(self, start_s: float) -> tuple[float, float, float]:
        """Return after how many steps the start is paid back, with the interval's ends; infinite
        without a gain.

        >>> Gain(0.5, 0.4, 0.8).pays_after(20.0)
        (40.0, 25.0, 50.0)
        """

        def steps(gain_s: float) -> float:
            return start_s / gain_s if gain_s > 0 else math.inf

        return steps(self.seconds), steps(self.high_s), steps(self.low_s)

    def describe(self, start_s: float) -> str:
        """Return the gain and its break-even as text for people.

        >>> Gain(0.036, 0.033, 0.04, 24).describe(25.2)
        'pays from 700 steps on (95 %: 630 to 764): it takes 25.2 s once and gains 36 ms a step (33 to 40), in 24 pairs'
        >>> Gain(0.001, -0.004, 0.006).describe(25.2)
        'does not pay here: it takes 25.2 s once and gains 1 ms a step (95 %: -4 to 6), as predicted'
        """
        how = f"in {self.num_pairs} pairs" if self.num_pairs else "as predicted"
        gain, low, high = (
            f"{1e3 * seconds:.3g}" for seconds in (self.seconds, self.low_s, self.high_s)
        )
        if not self.is_sure:
            return (
                f"does not pay here: it takes {start_s:.3g} s once and gains {gain} ms a step (95 %: {low} to "
                f"{high}), {how}"
            )
        steps, fewest, most = self.pays_after(start_s)
        return (
            f"pays from {steps:.0f} steps on (95 %: {fewest:.0f} to {most:.0f}): it takes {start_s:.3g} s once and "
            f"gains {gain} ms a step ({low} to {high}), {how}"
        )
