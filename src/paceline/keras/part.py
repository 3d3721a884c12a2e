"""Which part of a batch a rank computes, while it computes it, and what ranks tell each other about the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.keras.group import RankGroup


@dataclass(frozen=True)
class Part:
    """A rank's run of consecutive samples of one batch.

    order: of random rows where a tensor has several for each sample, of `draws.ORDERS`.
    counts: samples of each rank. A rank without any computes the batch's first sample, at weight zero, so that every
        rank enters every collective.
    """

    group: RankGroup
    counts: tuple[int, ...]
    order: str = "blocks"

    @property
    def count(self) -> int:
        return self.counts[self.group.rank]

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def rows(self) -> int:
        """Samples in this rank's tensors: `count`, or one where it has none."""
        return max(1, self.count)

    @property
    def start(self) -> int:
        """Of this rank's rows in the batch."""
        return sum(self.counts[: self.group.rank]) if self.count else 0

    @property
    def weight(self) -> float:
        """Of a mean over this rank's samples in the mean over the batch."""
        return self.count / self.total

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all ranks; a rank without samples adds nothing. A collective."""
        return self.group.sum(tensor if self.count else torch.zeros_like(tensor))

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """All ranks' rows in the order of the batch; dim 0 has one or several for each sample. A collective."""
        per_sample = tensor.shape[0] // self.rows
        return self.group.gather(
            tensor.detach()[: per_sample * self.count],
            [per_sample * count for count in self.counts],
        )


_current: list[Part | None] = [None]


def current_part() -> Part | None:
    """The part of a batch that this process computes now; None where it computes whole ones."""
    return _current[-1]


@contextmanager
def computing(part: Part | None) -> Iterator[None]:
    """While a part is computed; with None, a computation inside that is of the whole batch or of none."""
    _current.append(part)
    try:
        yield
    finally:
        _current.pop()


def in_part(original: Any, replacement: Any) -> Any:
    """A function that is `replacement(part, original, *args, **kwargs)` while a part is computed, else `original`."""

    def function(*args: Any, **kwargs: Any) -> Any:
        part = current_part()
        return (
            original(*args, **kwargs)
            if part is None
            else replacement(part, original, *args, **kwargs)
        )

    return function
