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

    mtbf_s: mean time between failures, of all devices together. write_s: of a checkpoint, until it can be read again.
    restart_s: until ranks compute again, the checkpoint's reading included. blocked_s: so long of write_s training
    waits; None: for all of it.

    Raises:
        ValueError: a time is not above 0, or training waits longer than the checkpoint takes.
    """

    mtbf_s: float
    write_s: float
    restart_s: float
    blocked_s: float | None = None

    def __post_init__(self) -> None:
        if not (self.mtbf_s > 0 and self.write_s > 0 and self.restart_s >= 0 and 0 < self.waited_s <= self.write_s):
            raise ValueError(f"times must be above 0, and training waits no longer than it is written: {self}")

    @property
    def waited_s(self) -> float:
        """For how long training waits for a checkpoint."""
        return self.write_s if self.blocked_s is None else self.blocked_s

    @property
    def beside_s(self) -> float:
        """For how long training goes on while a checkpoint is written and can't be read yet."""
        return self.write_s - self.waited_s


def young_interval_s(failures: Failures) -> float:
    """Seconds of work between checkpoints. Source: Young 1974, A first order approximation to the optimum checkpoint
    interval.

    >>> young_interval_s(Failures(mtbf_s=20_000, write_s=100, restart_s=0))
    2000.0
    """
    return math.sqrt(2 * failures.waited_s * failures.mtbf_s)


def daly_interval_s(failures: Failures) -> float:
    """Seconds of work between checkpoints, for writing that takes a larger part of the time between failures.

    No shorter than a checkpoint is written beside the training: the next one would wait for it.

    Source: Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps, equation 37.
    """
    waited_s, mtbf_s = failures.waited_s, failures.mtbf_s
    if waited_s >= 2 * mtbf_s:
        return max(mtbf_s, failures.beside_s)
    part = waited_s / (2 * mtbf_s)
    best_s = math.sqrt(2 * waited_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - waited_s
    return max(best_s, failures.beside_s)


def goodput(failures: Failures, interval_s: float) -> float:
    """The part of the time that is progress which lasts, with a checkpoint after every interval of work.

    A failure while a checkpoint is written beside the training goes back to the one before. A failure so costs the time
    of this writing more, on average.

    Source: Daly 2006, its complete model: failures may also come while a checkpoint is written and while ranks restart.
    """
    mtbf_s = failures.mtbf_s
    exponent = (interval_s + failures.waited_s) / mtbf_s
    again_s = failures.restart_s + failures.beside_s
    if exponent + again_s / mtbf_s > 700:  # beyond what a float holds: nothing ever lasts
        return 0.0
    return interval_s / (mtbf_s * math.exp(again_s / mtbf_s) * math.expm1(exponent))


def simulated_goodput(failures: Failures, interval_s: float, *, intervals: int = 10_000, seed: int = 0) -> float:
    """The same, played: so many intervals of work, with failures drawn from an exponential distribution."""
    draws = random.Random(seed)
    until_failure_s, passed_s = draws.expovariate(1 / failures.mtbf_s), 0.0

    def lasted_s(seconds: float) -> float:
        """How much of so many seconds passes without a failure."""
        nonlocal until_failure_s, passed_s
        lasting_s = min(seconds, until_failure_s)
        passed_s += lasting_s
        until_failure_s = draws.expovariate(1 / failures.mtbf_s) if lasting_s < seconds else until_failure_s - seconds
        return lasting_s

    done, is_written = 0, True  # intervals, and whether the last one's checkpoint can be read
    while done < intervals:
        segment_s = interval_s + failures.waited_s
        lasting_s = lasted_s(segment_s)
        is_written = is_written or lasting_s >= failures.beside_s
        if lasting_s == segment_s:
            done, is_written = done + 1, failures.beside_s == 0
            continue
        done, is_written = done - (not is_written), True
        while lasted_s(failures.restart_s) < failures.restart_s:
            pass
    return intervals * interval_s / passed_s
