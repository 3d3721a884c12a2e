"""What failures cost a long run: how often to write a checkpoint, and which part of the time is progress.

Failures come at any time with the same probability and stop everything. Work since the last checkpoint is done again.
What a failure takes away for longer, and how the run goes on meanwhile, is in `outages.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from paceline.simulate.outages import Outages

NOTHING_LOST = Outages()

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
        if not (
            self.mtbf_s > 0
            and self.write_s > 0
            and self.restart_s >= 0
            and 0 < self.waited_s <= self.write_s
        ):
            raise ValueError(
                f"times must be above 0, and training waits no longer than it is written: {self}"
            )

    @property
    def waited_s(self) -> float:
        """For how long training waits for a checkpoint."""
        return self.write_s if self.blocked_s is None else self.blocked_s

    @property
    def beside_s(self) -> float:
        """For how long training goes on while a checkpoint is written and can't be read yet."""
        return self.write_s - self.waited_s


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


def goodput(failures: Failures, interval_s: float, outages: Outages = NOTHING_LOST) -> float:
    """The part of the time that is progress which lasts, with a checkpoint after every interval of work. Time in which
    a run lacks units counts as its speed then.

    A failure while a checkpoint is written beside the training goes back to the one before. A failure so costs the time
    of this writing more, on average. What a run lacks is taken to be independent of where it is in an interval.

    Source: Daly 2006, its complete model: failures may also come while a checkpoint is written and while ranks restart.
    """
    mtbf_s, num_units, num_spares = failures.mtbf_s, outages.num_units, outages.num_spares
    # The start of a run that has ended, in the place of a restart. Either begins again with each failure that hits it.
    resuming_s = mtbf_s * (
        math.exp(min(700.0, outages.resumed_s / mtbf_s))
        - math.exp(min(700.0, failures.restart_s / mtbf_s))
    )
    out, lasting = outages.out_parts(mtbf_s), 0.0
    parts = [
        sum(out[: num_spares + 1]),
        *out[num_spares + 1 :],
    ]  # of the time, by how many units the run lacks
    for lacking, (part, speed) in enumerate(zip(parts, outages.speeds, strict=True)):
        fewer = replace(failures, mtbf_s=mtbf_s * num_units / (num_units - lacking))
        lasting += part * speed * _with_all(fewer, interval_s)
    # Who is back before the others have begun again begins with them.
    is_joined = outages.most_lacking > 0 and outages.repair_s > failures.restart_s
    ends = (
        out[-1] * (num_units - outages.most_lacking) / num_units if outages.repair_s else 0.0
    )  # a failure
    costs_s = is_joined * outages.joining_s + ends * resuming_s
    return lasting / (1 + costs_s / mtbf_s)


def _with_all(failures: Failures, interval_s: float) -> float:
    """The goodput of a run that lacks nothing after a restart."""
    mtbf_s = failures.mtbf_s
    exponent = (interval_s + failures.waited_s) / mtbf_s
    again_s = failures.restart_s + failures.beside_s
    if exponent + again_s / mtbf_s > 700:  # beyond what a float holds: nothing ever lasts
        return 0.0
    return interval_s / (mtbf_s * math.exp(again_s / mtbf_s) * math.expm1(exponent))
