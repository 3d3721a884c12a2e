"""Ranks that share parameters must call the same units in the same order: a roll call before each gathering.

Without it, ranks whose data take different branches of a model would gather different units together: they would
hang, or go on with each other's weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.errors import TrainingError


class Roll:
    """Compares over a group of ranks which unit comes next. Its messages are small and stay on the CPU."""

    def __init__(self, units: Sequence[str], group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.units, self.group, self.ranks = units, group, ranks

    def call(self, unit: int) -> None:
        """The unit of this number is next. Collective.

        Raises:
            TrainingError: on every rank, if they don't all call the same unit.
        """
        ends = torch.tensor([unit, -unit])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.group)
        if int(ends[0]) != -int(ends[1]):
            self._refuse(unit)

    def end(self) -> None:
        """Forward is through. Collective; raises as `call` does."""
        self.call(len(self.units))

    def _refuse(self, unit: int) -> None:
        everyone = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        dist.all_gather(everyone, torch.tensor([unit]), group=self.group)
        places = [f"rank {rank} {'is at the end of forward' if at == len(self.units) else f'calls {self.units[at]!r}'}"
                  for rank, at in zip(self.ranks, (int(value) for value in everyone), strict=True)]
        raise TrainingError(f"ranks that share parameters call different blocks of the model: {', '.join(places)}",
                            hint="which blocks are used depends on the data: use a data=N plan, or put the blocks to "
                                 "choose from into one module that is itself a member of a ModuleList or Sequential")
