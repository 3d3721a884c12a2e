"""From the order of data to micro-batches on the device, with or without loader workers.

A rank fetches only its own samples. Random augmentation inside the data set draws from a stream keyed by the
sample's place in the epoch, so a sample looks the same on any number of ranks and after a resume.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from paceline.errors import JobError, PacelineError, TrainingError
from paceline.launch.failure import user_frames
from paceline.runtime.order import Order, Window, split
from paceline.runtime.streams import key_to_seed, seed_sample, seed_streams
from paceline.runtime.upload import uploaded


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward and backward.

    samples: How many count. 0 marks a stand-in: the window's first sample with weight zero, which a rank runs
        when it has none of its own, so that every rank enters every collective.
    """

    input: Any
    target: Any
    samples: int

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> MicroBatch:
        """On the device; floating-point tensors as `dtype` if one is given."""
        move = lambda tensor: uploaded(  # noqa: E731
            tensor, device, dtype if dtype and tensor.is_floating_point() else None)
        return MicroBatch(map_tensors(move, self.input), map_tensors(move, self.target), self.samples)

    def call(self, model: Any) -> Any:
        """The model's output: a tuple or list input is passed as *args, a mapping as **kwargs."""
        args, kwargs = self.arguments()
        return model(*args, **kwargs)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with."""
        if isinstance(self.input, Mapping):
            return (), dict(self.input)
        return tuple(self.input) if isinstance(self.input, tuple | list) else (self.input,), {}


def map_tensors(function: Any, value: Any) -> Any:
    """The value with every tensor in its tuples, lists and mappings replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        twin: Any = {} if type(value) is dict else copy.copy(value)  # a model's output may be more than its items
        for key, item in value.items():
            twin[key] = map_tensors(function, item)
        return twin
    if isinstance(value, tuple | list):
        mapped = [map_tensors(function, item) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return value


@dataclass(frozen=True, slots=True)
class DataShard:
    """Which part of every window this rank takes: replica `index` of `len(shares)`, in `num_microbatches` cuts."""

    shares: Sequence[int]
    index: int
    num_microbatches: int

    def cuts(self, count: int) -> list[range]:
        """This rank's micro-batches as offsets into a window of `count` samples; some may be empty."""
        own = split(count, self.shares)[self.index]
        return [range(own.start + cut.start, own.start + cut.stop)
                for cut in split(len(own), [1] * self.num_microbatches)]


def training_feed(data: Any, *, order: Order | None, batch: int, seed: int, drop_last: bool, part: DataShard,
                  steps: range, epochs: int | None, loader_workers: int) -> Iterator[tuple[Window, list[MicroBatch]]]:
    """The windows of these optimizer steps with this rank's micro-batches, on the CPU.

    epochs: Where a stream ends; None if `steps` says so.
    order: None for a stream of unknown length: every rank reads the whole stream and keeps its part of each
        window, so that ranks can't disagree on where it ends; a resumed run reads up to its place again.
    """
    if order is None:
        if loader_workers:
            raise JobError("an iterable data set is read by each rank itself; loader workers would read it again",
                           hint="--loader-workers 0, or a data set with __len__ and __getitem__")
        windows = _stream_windows(data, batch=batch, seed=seed, drop_last=drop_last, epochs=epochs)
        return _stream_feed(windows, part=part, steps=steps)
    return _indexed_feed(data, order=order, part=part, steps=steps, loader_workers=loader_workers)


def _indexed_feed(data: Any, *, order: Order, part: DataShard, steps: Sequence[int],
                  loader_workers: int) -> Iterator[tuple[Window, list[MicroBatch]]]:
    cuts = _Cuts(data, order, part, steps)
    made: Iterator[MicroBatch] = (cuts[index] for index in range(len(cuts)))
    if loader_workers:
        made = map(_raised, DataLoader(_Loaded(cuts), batch_size=None, num_workers=loader_workers))
    for step in steps:
        yield order.window(step), list(islice(made, part.num_microbatches))


class _Cuts(torch.utils.data.Dataset[MicroBatch]):
    """This rank's micro-batches of these steps as the items of a data set, so that loader workers make whole ones."""

    def __init__(self, data: Any, order: Order, part: DataShard, steps: Sequence[int]) -> None:
        self.data, self.order, self.part, self.steps = data, order, part, steps

    def __len__(self) -> int:
        return len(self.steps) * self.part.num_microbatches

    def __getitem__(self, index: int) -> MicroBatch:
        which_step, which_cut = divmod(index, self.part.num_microbatches)
        window = self.order.window(self.steps[which_step])
        cut = self.part.cuts(window.count)[which_cut]
        positions = [window.start + offset for offset in cut] or [window.start]
        pair = fetch(self.data, self.order.indices(window.epoch, positions), positions,
                     seed=key_to_seed(self.order.seed, "sample", window.epoch))
        return MicroBatch(*pair, samples=len(cut))


class _Loaded(torch.utils.data.Dataset[MicroBatch | PacelineError]):
    """What a loader worker sends: an error as a value, as the loader would make one long text of it and its trace."""

    def __init__(self, cuts: _Cuts) -> None:
        self.cuts = cuts

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index: int) -> MicroBatch | PacelineError:
        try:
            return self.cuts[index]
        except PacelineError as error:
            error.where = user_frames(error)[0]  # type: ignore[attr-defined]  # frames don't travel
            return error


def _raised(loaded: MicroBatch | PacelineError) -> MicroBatch:
    if isinstance(loaded, PacelineError):
        raise loaded
    return loaded


def _stream_feed(windows: Iterator[tuple[Window, list[Any]]], *, part: DataShard,
                 steps: range) -> Iterator[tuple[Window, list[MicroBatch]]]:
    position = 0
    for step in steps:
        while position < step:  # a resumed run's place in the stream
            if next(windows, None) is None:
                return
            position += 1
        found = next(windows, None)
        if found is None:
            return
        position += 1
        window, items = found
        yield window, [
            MicroBatch(*collate([items[offset] for offset in cut or [0]], [window.start + o for o in cut or [0]]),
                       samples=len(cut))
            for cut in part.cuts(window.count)
        ]


def _stream_windows(data: Any, *, batch: int, seed: int, drop_last: bool,
                    epochs: int | None) -> Iterator[tuple[Window, list[Any]]]:
    for epoch in count() if epochs is None else range(epochs):
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        seed_streams(seed, "stream", epoch, -1)
        items, start = iter(data), 0
        while True:
            seed_streams(seed, "stream", epoch, start)  # the same on every rank, whatever it drew since
            taken = list(islice(items, batch))
            if taken and not (drop_last and len(taken) < batch):
                yield Window(epoch, start, len(taken)), taken
            start += len(taken)
            if len(taken) < batch:
                break
        if start == 0 or (drop_last and start < batch):
            raise JobError(f"the data stream gave {start} samples in epoch {epoch}",
                           hint="an iterable data set must give at least one batch each time it is iterated")


def evaluation_feed(data: Any, *, batch: int, part: DataShard, seed: int) -> Iterator[MicroBatch]:
    """Every sample of the data exactly once over all ranks, in order; each rank gets equally many micro-batches."""
    if is_stream(data):
        seed_streams(seed, "evaluation", 0)
        items, start = iter(data), 0
        while taken := list(islice(items, batch)):
            for cut in part.cuts(len(taken)):
                used = list(cut) or [0]
                yield MicroBatch(*collate([taken[i] for i in used], [start + i for i in used]), samples=len(cut))
            start += len(taken)
        return
    for first in range(0, len(data), batch):
        for cut in part.cuts(min(batch, len(data) - first)):
            used = [first + offset for offset in cut] or [first]
            pair = fetch(data, used, used, seed=key_to_seed(seed, "evaluation"))
            yield MicroBatch(*pair, samples=len(cut))


def evaluated_part(data: Any, *, batch: int, part: DataShard) -> float:
    """A replica's fraction of the samples in `evaluation_feed`; by its share where a stream doesn't tell how many."""
    if is_stream(data):
        return part.shares[part.index] / sum(part.shares)
    sizes = [min(batch, len(data) - first) for first in range(0, len(data), batch)]
    return sum(len(cut) for size in sizes for cut in part.cuts(size)) / len(data)


def example_batch(data: Any, samples: int, *, first: int = 0) -> MicroBatch:
    """Samples of the data from the first one on, and again from its beginning where it ends."""
    if is_stream(data):
        items = list(islice(iter(data), first + samples))
        if not items:
            raise JobError("the data stream gave no samples")
        places = [i % len(items) for i in range(first, first + samples)]
        return MicroBatch(*collate([items[i] for i in places], places), samples=samples)
    places = [i % len(data) for i in range(first, first + samples)]
    return MicroBatch(*fetch(data, places, places, seed=0), samples=samples)


def is_stream(data: Any) -> bool:
    """Whether the data can only be read from its beginning."""
    return isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def fetch(data: Any, indices: Sequence[int], positions: Sequence[int], *, seed: int) -> tuple[Any, Any]:
    """(input, target) of these samples, stacked along dim 0.

    Raises:
        TrainingError: a sample can't be read, is no (input, target) pair, or doesn't stack with the others.
    """
    while type(data) is Subset:  # what random_split makes
        indices, data = [data.indices[index] for index in indices], data.dataset
    if type(data) is TensorDataset:  # no per-sample work at all: one gather a tensor
        if len(data.tensors) != 2:
            raise TrainingError(f"a sample is {len(data.tensors)} tensors and not (input, target)",
                                hint="put several inputs into a tuple or a mapping: ((a, b), target)")
        at = torch.as_tensor(indices)
        return data.tensors[0][at], data.tensors[1][at]
    return collate([_sample(data, index, position, seed) for index, position in zip(indices, positions, strict=True)],
                   indices)


def _sample(data: Any, index: int, position: int, seed: int) -> Any:
    seed_sample(seed, position)
    try:
        return data[index]
    except Exception as error:
        raise TrainingError(f"sample {index} of the data can't be read: {type(error).__name__}: {error}") from error


def collate(items: Sequence[Any], indices: Sequence[int]) -> tuple[Any, Any]:
    """Stack (input, target) pairs; names the sample that is no pair or doesn't fit."""
    for item, index in zip(items, indices, strict=True):
        if not isinstance(item, tuple | list) or len(item) != 2:
            kind = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
            raise TrainingError(f"sample {index} is a {kind} and not (input, target)",
                                hint="a data set's item is (input, target); several inputs go into a tuple or mapping")
    try:
        inputs, targets = default_collate([tuple(item) for item in items])
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        shapes = [describe(item) for item in items]
        usual = max(shapes, key=shapes.count)  # the first of equally many: not left to the order of a set
        for shape, index in zip(shapes, indices, strict=True):
            if shape != usual:
                raise TrainingError(f"sample {index} is {shape} and others are {usual}: they can't be stacked",
                                    hint="samples of one batch must have equal shapes: pad or crop in the data set") \
                    from error
        raise TrainingError(f"samples can't be stacked: {error}") from error
    return inputs, targets


def describe(value: Any) -> str:
    """Shapes and types of a sample, in a line.

    >>> describe((torch.zeros(3, 2), 1))
    '(3x2, int)'
    """
    if hasattr(value, "shape"):
        return "x".join(map(str, value.shape)) or "scalar"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(describe, value)) + ")"
    return type(value).__name__
