"""The order of data that a job's own sampler draws. Seed and epoch alone determine it."""

from __future__ import annotations

import operator
from typing import Any

from paceline.base.errors import JobError
from paceline.base.streams import seeded_for_epoch
from paceline.job.groups import DrawnGroups


class DrawnEpochs:
    """The draws of a sampler by epoch, equal on every rank and after a resume.

    The sampler draws from random streams that the seed and the epoch determine: the global
    generators of torch, numpy and random, and the sampler's own `generator` if it has one. If it
    has `set_epoch`, that is called with the epoch.
    """

    def __init__(self, sampler: Any, seed: int, size: int) -> None:
        self.sampler, self.seed, self.size = sampler, seed, size
        self.epoch, self.known = -1, list[int]()

    def indices(self, epoch: int) -> list[int]:
        """Return all indices of an epoch. Those of the last epoch that was asked for are kept.

        Raises:
            JobError: the number of indices is not the sampler's length, they are no indices of the
                data, or a second draw gives others.
        """
        if epoch != self.epoch:
            drawn = self._draw(epoch)
            if self.epoch < 0 and self._draw(epoch) != drawn:
                raise self._drew_others(epoch)
            self.epoch, self.known = epoch, drawn
        return self.known

    @property
    def _name(self) -> str:
        if isinstance(self.sampler, DrawnGroups):
            return f"the batch sampler {type(self.sampler.groups).__name__}"
        return f"the sampler {type(self.sampler).__name__}"

    def _drew_others(self, epoch: int) -> JobError:
        return JobError(
            f"{self._name} drew other samples when it was asked twice for epoch {epoch}: ranks and a "
            "resumed run would not see the same order",
            hint="let it draw from torch's global generator or from an attribute `generator`, or give it "
            "set_epoch(epoch)",
        )

    def _draw(self, epoch: int) -> list[int]:
        with seeded_for_epoch(self.sampler, self.seed, epoch):
            drawn = list(self.sampler)
        if isinstance(self.sampler, DrawnGroups):
            if len(drawn) != self.sampler.windows_of(self.seed).samples(epoch):
                raise self._drew_others(epoch)
        elif len(drawn) != len(self.sampler):
            raise JobError(
                f"{self._name} has the length {len(self.sampler)} and drew {len(drawn)} samples in epoch "
                f"{epoch}",
                hint="it must draw as many in each epoch: `__len__` says when an epoch ends",
            )
        for index in drawn:
            if not hasattr(index, "__index__") or not 0 <= operator.index(index) < self.size:
                raise JobError(
                    f"{self._name} drew {index!r}, and the data has the indices 0 to {self.size - 1}",
                    hint="a sampler draws one index at a time; one that draws batches is a batch sampler, "
                    "and batch= says how many samples a step takes",
                )
        return [operator.index(index) for index in drawn]
