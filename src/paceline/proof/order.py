"""The order of data, implemented a second time in plain code, to compare the first implementation
with it.

This module follows the contract (docs/tour.md, "The order of data") with whole numbers and loops.
It shares with `job/order.py` and `training/feed.py` only the seeds of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Subset

from paceline.base.streams import drawing, kept_streams, key_to_seed, seed_sample, seed_streams
from paceline.job import Job
from paceline.job.batches import Collate, collated
from paceline.job.groups import DrawnGroups
from paceline.job.phases import value_at
from paceline.proof.device import one_device
from paceline.training.feed import MicroBatch, is_stream

_WORD = (1 << 64) - 1
_ROUNDS = 8


def shuffled(position: int, size: int, seed: int) -> int:
    """Return which of `size` samples is at a position of the permutation that the seed fixes.

    The permutation is a Feistel network of eight rounds over the next power of four. A result
    outside the range goes through the network again.

    >>> sorted(shuffled(position, 5, seed=3) for position in range(5))
    [0, 1, 2, 3, 4]
    """
    bits = 1
    while 4**bits < max(size, 2):
        bits += 1
    mask = 2**bits - 1
    while True:
        left, right = position >> bits, position & mask
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right, key_to_seed(seed, turn)) & mask)
        position = (left << bits) | right
        if position < size:
            return position


def _mixed(value: int, key: int) -> int:
    """Mix a value with a key by the finaliser of splitmix64 (Steele et al. 2014)."""
    value = (value + key) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def few_samples(job: Job, steps: int) -> Job:
    """Return the job with so few of its samples that its first steps include the short last batch of
    an epoch.
    """
    if job.sampler is not None or job.num_samples is None or job.drop_last or is_stream(job.data):
        return job
    last_batch_samples = job.num_samples % job.batch
    samples = (min(steps, 3) - 1) * job.batch + last_batch_samples
    if last_batch_samples and steps > 1 and samples < job.num_samples:
        return replace(job, data=Subset(job.data, range(samples)))
    return job


def windows(job: Job) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield for every optimizer step its epoch, the positions of its samples in the epoch, and
    their indices; endless.
    """
    num_samples, epoch, step = len(job.data) if job.sampler is None else len(job.sampler), 0, 0
    while True:
        start, seed = 0, key_to_seed(job.seed, "order", epoch)
        drawn = _drawn(job, epoch) if job.sampler is not None else None
        if drawn and isinstance(drawn[0], list):
            for group in drawn:
                yield epoch, list(range(start, start + len(group))), group
                start += len(group)
            epoch += 1
            continue
        while start < num_samples:
            size = value_at(job.batch, step, epoch)
            positions = [
                position for position in range(start, start + size) if position < num_samples
            ]
            if len(positions) == size or not job.drop_last:
                yield (
                    epoch,
                    positions,
                    [
                        shuffled(position, num_samples, seed) if drawn is None else drawn[position]
                        for position in positions
                    ],
                )
                step += 1
            start += size
        epoch += 1


def _drawn(job: Job, epoch: int) -> list[Any]:
    """Return the sampler's indices of an epoch, or its groups of indices.

    The seed and the epoch fix the generators from which they are drawn.
    """
    with kept_streams(), drawing():
        seed_streams(job.seed, "sampler", epoch)
        if isinstance(getattr(job.sampler, "generator", None), torch.Generator):
            job.sampler.generator.manual_seed(key_to_seed(job.seed, "sampler", epoch))
        if hasattr(job.sampler, "set_epoch"):
            job.sampler.set_epoch(epoch)
        if isinstance(job.sampler, DrawnGroups):
            return [[int(index) for index in group] for group in job.sampler.groups]
        return [int(index) for index in job.sampler]


@dataclass(frozen=True, slots=True)
class CollatedBatch(MicroBatch):
    """A batch that the job's `collate` made. It is cut as plans cut it: by collating some of its
    samples.
    """

    # makes the batch of the samples at these places of it
    picked: Callable[[Sequence[int]], MicroBatch] = lambda places: MicroBatch(None, None, 0)

    def mapped(self, function: Any) -> CollatedBatch:
        """Return the batch with every tensor replaced, here and in what `picked` makes."""
        made = MicroBatch.mapped(self, function)
        return CollatedBatch(
            made.input,
            made.target,
            made.samples,
            picked=lambda places: self.picked(places).mapped(function),
        )


def _batch(
    names: Sequence[Any], collate: Collate | None, items: Callable[[Sequence[int]], list[Any]]
) -> MicroBatch:
    """Return the batch of all samples.

    Args:
        names: Of the samples.
        items: Returns the samples at the given places.
    """

    def picked(places: Sequence[int]) -> MicroBatch:
        with kept_streams():
            return _batch(
                [names[place] for place in places],
                collate,
                lambda some: items([places[place] for place in some]),
            )

    inputs, targets = collated(items(range(len(names))), collate, names=names)
    return (
        MicroBatch(inputs, targets, len(names))
        if collate is None
        else CollatedBatch(inputs, targets, len(names), picked=picked)
    )


def whole_batches(job: Job, steps: int) -> Iterator[MicroBatch]:
    """Yield the first windows of the job on the proof's one device, each as one batch; fewer if a
    stream ends.
    """
    batches = (
        _stream(job)
        if is_stream(job.data)
        else (_indexed(job, step, *window) for step, window in enumerate(windows(job)))
    )
    for batch in islice(batches, steps):
        yield _on_device(job, batch)


def later_batches(job: Job, *, steps: int, count: int, samples: int) -> Iterator[MicroBatch]:
    """Yield the first samples of a few windows that lie apart, on the proof's one device.

    Args:
        steps: Of the job; if its sampler decides, those of the first epoch count.
        count: The largest number of windows.
        samples: The number of samples from each window.
    """
    from paceline.job.order import Order

    order = Order.of(job)
    last = (order.epoch_end(0) if job.sampler is not None else steps) - 1
    for step in list(dict.fromkeys(min(step, last) for step in (1, last // 2, last, 0)))[:count]:
        window = order.window(step)
        positions = window.positions[:samples]
        indices = order.indices(window.epoch, positions)
        yield _on_device(job, _indexed(job, step, window.epoch, positions, indices))


def _on_device(job: Job, batch: MicroBatch) -> MicroBatch:
    return batch.to(one_device(), job.input_dtype)


def _indexed(
    job: Job, step: int, epoch: int, positions: Sequence[int], indices: Sequence[int]
) -> MicroBatch:
    """Return the batch of samples at these positions of a step's window."""
    seed = key_to_seed(job.seed, "sample", epoch)
    items = partial(_items, job.data, seed, positions, indices)
    return _batch(indices, value_at(job.collate, step, epoch), items)


def _items(
    data: Any, seed: int, positions: Sequence[int], indices: Sequence[int], places: Sequence[int]
) -> list[Any]:
    """Return the samples at these places of a window, each drawn from its own stream."""
    items = []
    for place in places:
        seed_sample(seed, positions[place])
        items.append(data[indices[place]])
    return items


def _stream(job: Job) -> Iterator[MicroBatch]:
    epoch, step = 0, 0
    while job.epochs is None or epoch < job.epochs:
        if hasattr(job.data, "set_epoch"):
            job.data.set_epoch(epoch)
        seed_streams(job.seed, "stream", epoch, -1)
        items, start = iter(job.data), 0
        while True:
            seed_streams(job.seed, "stream", epoch, start)
            size = value_at(job.batch, step, epoch)
            taken = list(islice(items, size))
            if len(taken) == size or (taken and not job.drop_last):
                yield _batch(
                    range(len(taken)), value_at(job.collate, step, epoch), partial(_taken, taken)
                )
                step += 1
            start += len(taken)
            if len(taken) < size:
                break
        epoch += 1


def _taken(taken: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [taken[place] for place in places]


def order_difference(job: Job, *, steps: int) -> str | None:
    """Return in which step a run would read other samples than the contract says, in words; None if
    in none.

    The check uses the job's whole data set, although a proof trains only on its first samples. It
    covers the first steps, the last step of the first epoch and the first step of the second one.
    """
    from paceline.job.order import Order

    if is_stream(job.data):
        return None
    order = Order.of(job)
    last = order.epoch_end(0)
    wanted = sorted(
        {*range(min(steps, last + 1)), *((last - 1, last) if last * job.batch <= _FEW else ())}
    )
    for step, (epoch, positions, indices) in enumerate(islice(windows(job), wanted[-1] + 1)):
        if step not in wanted:
            continue
        window = order.window(step)
        if (window.epoch, list(window.positions)) != (epoch, positions):
            return (
                f"step {step + 1} would read positions {window.positions} of epoch {window.epoch}"
            )
        if order.indices(epoch, window.positions) != indices:
            return f"step {step + 1} would read other samples than the seed fixes"
    return None


_FEW = 20_000  # largest number of samples that are put in order a second time; takes 0.1 s
