"""What failures cost a long run: how often to write a checkpoint, and which part of the time is progress.

Failures come at any time with the same probability and stop everything. Work since the last checkpoint is done again.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

# Of a device, if nobody says: 2 TB/s of storage for 16,384 GPUs (Grattafiori et al. 2024, The Llama 3 Herd of Models,
# section 3.3.1).
CHECKPOINT_BYTES_PER_S = 2e12 / 16_384
# Until ranks compute again, without reading the checkpoint: finding the fault, another node, starting. A guess.
RESTART_S = 300.0


@dataclass(frozen=True, slots=True)
class Failures:
    """How a run fails, and what it does about it.

    mtbf_s: mean time between failures, of all devices together. write_s: of a checkpoint; training waits for it.
    restart_s: until ranks compute again, the checkpoint's reading included.

    Raises:
        ValueError: a time is not above 0.
    """

    mtbf_s: float
    write_s: float
    restart_s: float

    def __post_init__(self) -> None:
        if not (self.mtbf_s > 0 and self.write_s > 0 and self.restart_s >= 0):
            raise ValueError(f"times must be above 0: {self}")


def young_interval_s(failures: Failures) -> float:
    """Seconds of work between checkpoints. Source: Young 1974, A first order approximation to the optimum checkpoint
    interval.

    >>> young_interval_s(Failures(mtbf_s=20_000, write_s=100, restart_s=0))
    2000.0
    """
    return math.sqrt(2 * failures.write_s * failures.mtbf_s)


def daly_interval_s(failures: Failures) -> float:
    """Seconds of work between checkpoints, for writing that takes a larger part of the time between failures.

    Source: Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps, equation 37.
    """
    write_s, mtbf_s = failures.write_s, failures.mtbf_s
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    part = write_s / (2 * mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - write_s


def goodput(failures: Failures, interval_s: float) -> float:
    """The part of the time that is progress which lasts, with a checkpoint after every interval of work.

    Source: Daly 2006, its complete model: failures may also come while a checkpoint is written and while ranks restart.
    """
    mtbf_s = failures.mtbf_s
    exponent = (interval_s + failures.write_s) / mtbf_s
    if exponent + failures.restart_s / mtbf_s > 700:  # beyond what a float holds: nothing ever lasts
        return 0.0
    return interval_s / (mtbf_s * math.exp(failures.restart_s / mtbf_s) * math.expm1(exponent))


def simulated_goodput(failures: Failures, interval_s: float, *, intervals: int = 10_000, seed: int = 0) -> float:
    """The same, played: so many intervals of work, with failures drawn from an exponential distribution."""
    draws = random.Random(seed)
    until_failure_s, passed_s = draws.expovariate(1 / failures.mtbf_s), 0.0

    def outlasts(seconds: float) -> bool:
        """Whether so many seconds pass without a failure; time goes on, to the failure at most."""
        nonlocal until_failure_s, passed_s
        lasted = seconds <= until_failure_s
        passed_s += min(seconds, until_failure_s)
        until_failure_s = until_failure_s - seconds if lasted else draws.expovariate(1 / failures.mtbf_s)
        return lasted

    for _ in range(intervals):
        while not outlasts(interval_s + failures.write_s):
            while not outlasts(failures.restart_s):
                pass
    return intervals * interval_s / passed_s
