"""The hosts that failures take away until they are repaired, and how a run goes on without them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outages:
    """What the failures of a run take away, and for how long. Here: nothing that isn't back at once.

    num_units: hosts that the run computes on. Each fails as often as any other.
    num_spares: units more, that wait for the place of one that is lost. They fail as often.
    repair_s: until a lost one is back; 0 where nothing is lost but time.
    speeds: of the run while it lacks none, one, two, ... units, of that with none lacking. If it lacks more, it ends.
    joining_s: what it costs to go on with a unit that is back, where the run lacks one.
    resumed_s: what it costs to resume a run that has ended, once there are enough units.

    Raises:
        ValueError: a number or a time makes no sense.
    """

    num_units: int = 1
    num_spares: int = 0
    repair_s: float = 0.0
    speeds: tuple[float, ...] = (1.0,)
    joining_s: float = 0.0
    resumed_s: float = 0.0

    def __post_init__(self) -> None:
        if not (
            self.num_units >= 1
            and self.num_spares >= 0
            and 1 <= len(self.speeds) <= self.num_units
            and min(self.repair_s, self.joining_s, self.resumed_s) >= 0
            and min(self.speeds) > 0
        ):
            raise ValueError(f"no run has such outages: {self}")

    @property
    def most_lacking(self) -> int:
        """Units that the run may lack."""
        return len(self.speeds) - 1

    def part_out(self, mtbf_s: float) -> float:
        """The part of the time that a unit is out. mtbf_s: between failures of the units of a whole run."""
        return self.repair_s / (self.repair_s + mtbf_s * self.num_units)

    def out_parts(self, mtbf_s: float) -> list[float]:
        """Of all time, the parts in which no unit is out, one, two, ... as many as may be.

        Units fail and are repaired by themselves, so that a binomial distribution says how many are out, whatever that
        of the time of a repair.

        >>> [round(part, 3) for part in Outages(num_units=4, repair_s=1.0, speeds=(1.0, 0.7)).out_parts(mtbf_s=2.25)]
        [0.656, 0.292]
        """
        part, total = self.part_out(mtbf_s), self.num_units + self.num_spares
        most = self.num_spares + self.most_lacking
        if part in (0, 1):
            return [1.0 - part] + [0.0] * most
        return [
            math.exp(
                math.lgamma(total + 1)
                - math.lgamma(count + 1)
                - math.lgamma(total - count + 1)
                + count * math.log(part)
                + (total - count) * math.log1p(-part)
            )
            for count in range(most + 1)
        ]


def spares_for(num_units: int, part_out: float) -> int:
    """How many spares there must be so that they are as many as are out on average, of all units and spares, and two
    standard deviations more; at least 1. part_out: of the time, that each is out.

    >>> spares_for(8, 1e-4), spares_for(2048, 0.0016)
    (1, 7)
    """
    part_up = 1 - part_out
    deviation = math.sqrt(part_out * part_up)
    # all = units + spares solve: all * part_up - 2 * deviation * sqrt(all) = units
    root = (deviation + math.sqrt(deviation**2 + part_up * num_units)) / part_up
    return max(1, math.ceil(root**2 - num_units))
