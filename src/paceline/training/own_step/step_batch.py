"""The batch that a job's own step gets: this rank's samples, and how they are cut into
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from paceline.base.errors import TrainingError
from paceline.base.nested import items_of, map_tensors, tensors_in, with_items
from paceline.training.feed import MicroBatch


class StepBatch:
    """Samples of a step: all of them on one device, or a part under other plans. `x, y = batch`
    gives input and target.
    """

    def __init__(self, pieces: Sequence[MicroBatch]) -> None:
        # The micro-batches of the batch. If none of them has samples, the batch is the stand-in
        # that they hold: one sample that counts nothing.
        self.pieces = pieces
        self._real = [piece for piece in pieces if piece.samples] or list(pieces[:1])

    @cached_property
    def input(self) -> Any:
        """The input of all samples, stacked along dim 0."""
        return joined([piece.input for piece in self._real], self.rows)

    @cached_property
    def target(self) -> Any:
        """The target of all samples, stacked along dim 0."""
        if all(piece.target is piece.input for piece in self._real):
            return self.input
        return joined([piece.target for piece in self._real], self.rows)

    def __len__(self) -> int:
        """The number of rows of its tensors."""
        return sum(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.input, self.target))

    @property
    def rows(self) -> list[int]:
        """The number of rows of each micro-batch that is in its tensors."""
        return [max(piece.samples, 1) for piece in self._real]

    def cut(self, value: Any, description: str) -> list[Any]:
        """Cut a value into the parts of each micro-batch. Tensors are cut along dim 0, which must
        have all samples.

        For a batch, return the input of each micro-batch.

        Raises:
            TrainingError: a tensor has another number of samples. `description` says in the message
                what it is.
        """
        if isinstance(value, StepBatch):
            return [piece.input for piece in value.pieces]
        starts = [sum(self.rows[:number]) for number in range(len(self.rows))]
        real = iter([(start, start + rows) for start, rows in zip(starts, self.rows, strict=True)])
        places = [next(real) if piece.samples else (0, 1) for piece in self.pieces]

        def rows_of(leaf: Any, start: int, end: int) -> Any:
            if isinstance(leaf, torch.Tensor) and not leaf.ndim:
                return leaf
            if len(leaf) != len(self):
                raise TrainingError(
                    f"{description} has a tensor of shape {tuple(leaf.shape)}, and the batch has "
                    f"{len(self)} samples along dim 0",
                    hint="close over what belongs to no sample in the loss; ctx.run(..., cut=False) runs a "
                    "model on inputs that are not cut",
                )
            return leaf[start:end]

        return [
            map_rows(partial(rows_of, start=start, end=end), value, len(self))
            for start, end in places
        ]


def input_of(value: Any) -> Any:
    """Return the input of a batch, and any other value as it is."""
    return value.input if isinstance(value, StepBatch) else value


class GatheredBatch(StepBatch):
    """The batch of all samples of a step, on whichever ranks they are.

    Input and target are gathered at the first access, which every rank must make.

    gather: returns the rows of all ranks for a value with rows of `batch`.
    """

    def __init__(self, batch: StepBatch, gather: Callable[[Any], Any], samples: int) -> None:
        super().__init__([MicroBatch(None, None, samples)])
        self._local_batch, self._gather = batch, gather

    @cached_property
    def input(self) -> Any:
        return self._gather(self._local_batch.input)

    @cached_property
    def target(self) -> Any:
        local = self._local_batch
        return self.input if local.target is local.input else self._gather(local.target)


def map_rows(function: Callable[[Any], Any], value: Any, samples: int) -> Any:
    """Return the value with every tensor, and every list with one item per sample, replaced."""
    return map_tensors(function, value, lambda item: is_list_of_samples(item, samples))


def is_list_of_samples(value: Any, samples: int) -> bool:
    """Whether this is a list with one item per sample, such as the boxes of each image.

    A list of tensors that have all samples along dim 0 is none.
    """
    if type(value) not in (tuple, list) or len(value) != samples:
        return False
    tensors = list(tensors_in(value))
    return not tensors or not all(tensor.ndim and len(tensor) == samples for tensor in tensors)


def joined(parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Join outputs, inputs or targets of micro-batches into those of one batch.

    Tensors are joined along dim 0. Lists with an item for each sample are joined end to end.

    rows: number of samples of each micro-batch.

    Raises:
        TrainingError: their shapes differ beyond dim 0.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, torch.Tensor):
        if not first.ndim:
            raise TrainingError(
                "an output without a dim of samples can't be joined over micro-batches",
                hint="return one row a sample",
            )
        try:
            return torch.cat(list(parts))
        except RuntimeError as error:
            raise TrainingError(
                f"tensors of micro-batches can't be joined: {str(error).splitlines()[0]}",
                hint="give ctx.run and ctx.backward the batch itself, which they run micro-batch by "
                "micro-batch, or pad all samples to one length",
            ) from error
    if any(map(is_list_of_samples, parts, rows)) and [*map(len, parts)] == [*rows]:
        return type(first)(item for part in parts for item in part)
    if (items := items_of(first)) is None:
        return first
    columns = [dict(items_of(part) or ()) for part in parts]
    if any(column.keys() != columns[0].keys() for column in columns):
        raise TrainingError(
            f"outputs of micro-batches can't be joined: each {type(first).__name__} holds something else",
            hint="return as many tensors, under the same names, whatever the samples are",
        )
    return with_items(
        first, [joined([column[key] for column in columns], rows) for key, _ in items]
    )
