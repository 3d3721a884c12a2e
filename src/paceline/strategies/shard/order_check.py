"""Checks that ranks that share parameters call the same units in the same order. They compare
before each gather.

Without the check, ranks whose data take different branches of a model would gather different units
together. They would hang, or continue with each other's weights.

On GPUs the check makes the host wait, and a gather does not. Ranks there therefore compare only if
the last forwards did not all take the same path. A rank that leaves the usual path is then alone at
its check, and reports that.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.base.errors import TrainingError
from paceline.base.waiting import waiting

ALIKE = 3  # forwards after which ranks expect the next unit without asking
# Most places that are kept; they need 3 MB. A model that skips blocks at random takes a different
# path each time.
MOST_PLACES = 10_000
PATIENCE_S = 60.0  # time for the others to join a comparison that some ranks may skip


class OrderCheck:
    """Compares the next unit over a group of ranks. Its messages are small and stay on the CPU.

    Args:
        expects: Whether ranks skip the comparison if earlier forwards always continued in the same
            way. The group must then have no other use.
    """

    def __init__(
        self, units: Sequence[str], group: dist.ProcessGroup, ranks: Sequence[int], *, expects: bool
    ) -> None:
        self.units, self.group, self.ranks, self.expects = units, group, ranks, expects
        self.before_any = self.place = _Place()
        self.num_places = 0

    def call(self, unit: int) -> None:
        """Report that the unit of this number comes next.

        Collective, unless all ranks have continued in this way from here often enough.

        Raises:
            TrainingError: the ranks call different units. Every rank raises it if all compare. If
                only some ranks leave the usual path, only these raise it.
        """
        if not self.expects:
            self._compare(unit, may_be_alone=False)
            return
        place = self.place
        is_known = place.times >= ALIKE and len(place.next) == 1
        if not (is_known and unit in place.next):
            self._compare(unit, may_be_alone=is_known)
        place.times += 1
        if unit not in place.next and self.num_places < MOST_PLACES:
            self.num_places += 1
            place.next[unit] = _Place()
        # Ranks always compare at a place that is not kept.
        self.place = place.next.get(unit) or _Place()

    def end(self) -> None:
        """Report the end of the forward. Collective, and raises like `call`."""
        self.call(len(self.units))
        self.place = self.before_any

    def _compare(self, unit: int, *, may_be_alone: bool) -> None:
        ends = torch.tensor([unit, -unit])
        work = dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.group, async_op=True)
        patience = (timedelta(seconds=PATIENCE_S),) if may_be_alone else ()
        try:
            with waiting:
                work.wait(*patience)
        except RuntimeError as error:
            if not may_be_alone:
                raise
            others = self._named(next(iter(self.place.next)))
            raise TrainingError(
                f"this rank {self._named(unit)}, and the ranks that it shares parameters with did not within "
                f"{PATIENCE_S:.0f} s: a rank that goes on as before {others}",
                hint=_WAY_OUT,
            ) from error
        if int(ends[0]) != -int(ends[1]):
            self._refuse(unit)

    def _refuse(self, unit: int) -> None:
        everyone = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        dist.all_gather(everyone, torch.tensor([unit]), group=self.group)
        places = [
            f"rank {rank} {self._named(int(called))}"
            for rank, called in zip(self.ranks, everyone, strict=True)
        ]
        raise TrainingError(
            f"ranks that share parameters call different blocks of the model: {', '.join(places)}",
            hint=_WAY_OUT,
        )

    def _named(self, unit: int) -> str:
        return (
            "is at the end of forward" if unit == len(self.units) else f"calls {self.units[unit]!r}"
        )


_WAY_OUT = (
    "which blocks are used depends on the data: use a data=N plan, or put the blocks to choose from into one "
    "module that is itself a member of a ModuleList or Sequential"
)


class _Place:
    """A place in a forward: how often it was passed, and which units came next.

    Equal on all ranks.
    """

    __slots__ = ("next", "times")

    def __init__(self) -> None:
        self.times, self.next = 0, dict[int, _Place]()
