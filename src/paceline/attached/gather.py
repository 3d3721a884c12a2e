"""Sums over the ranks that have parts of a batch, for rows that a script gathers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.base.errors import RanksDisagree, TrainingError


class SumsOfRows:
    """Sums tensors over ranks, in a group of its own: in a backward, gradients of weights use the other groups
    at the same time.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks, self.size = list(ranks), len(ranks)
        self._group: dist.ProcessGroup | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, which becomes the sum over ranks. Collective.

        Raises:
            TrainingError: ranks gather tensors of different shapes.
        """
        if self.size == 1:
            return tensor
        if self._group is None:
            self._group = dist.new_group(self._ranks, use_local_synchronization=True)
        try:
            dist.all_reduce(tensor, group=self._group)
        except RanksDisagree as error:
            raise TrainingError(
                f"ranks gather different tensors: {error}",
                hint="run.gather is called on all ranks, in one order, and rows have one shape on all of them: "
                "pad them to one length",
            ) from error
        return tensor
