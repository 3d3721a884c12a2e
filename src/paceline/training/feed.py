"""Makes micro-batches on the device from the order of data, with or without loader workers.

A rank fetches only its own samples. Random augmentation inside the data set draws from a stream
keyed by the sample's place in the epoch, so a sample looks the same on any number of ranks and
after a resume.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, islice
from multiprocessing.util import get_temp_dir
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from paceline.base.errors import JobError, PacelineError, TrainingError, in_words
from paceline.base.fork import die_with
from paceline.base.inherited import close_connections, closed_connections
from paceline.base.nested import map_batch
from paceline.base.streams import key_to_seed, seed_sample, seed_streams
from paceline.base.user_code import user_frames
from paceline.job import Job
from paceline.job.arrays import rows_of, taken
from paceline.job.batches import Collate, arguments_of, collated, is_sample, of_stacked
from paceline.job.loaders import Loading, Opened
from paceline.job.order import Order, Window, digest, split
from paceline.job.phases import value_at
from paceline.launch.process.failure import traced_cause
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.training.collate_draws import CollateDraws
from paceline.training.upload import uploaded

# The longest path of a temporary folder, in bytes, in which multiprocessing can name a socket.
_LONGEST_TEMPORARY = 70
_EVALUATION = -1  # the epoch of an evaluation's windows, because its samples come once


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward and backward."""

    input: Any
    target: Any
    # The number of samples that count. 0 marks a padding batch: the window's first sample with
    # weight zero. A rank runs it when it has no samples, so that every rank enters every
    # collective.
    samples: int
    digest: int = 0  # of the samples that count; see `order.digest`

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> MicroBatch:
        """Return the micro-batch on the device. Floating-point tensors become `dtype` if one is
        given.
        """
        move = lambda tensor: uploaded(  # noqa: E731
            tensor, device, dtype if dtype and tensor.is_floating_point() else None
        )
        return self.mapped(move)

    def mapped(self, function: Any) -> MicroBatch:
        """Return the micro-batch with every tensor replaced. A target that is the input itself
        stays so.
        """
        made = map_batch(function, (self.input, self.target))
        return MicroBatch(*made, self.samples, self.digest)

    def call(self, model: Any) -> Any:
        """Return the model's output; see `arguments_of`."""
        args, kwargs = self.arguments()
        try:
            return model(*args, **kwargs)
        except TypeError as error:
            if len(args) > 1 and "positional argument" in str(error):
                error.add_note(
                    f"the input is a {type(self.input).__name__} of {len(args)}, which is passed as "
                    f"{len(args)} arguments; one that is a sequence itself goes into a tuple: (images,)"
                )
            raise

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for a call of the model."""
        return arguments_of(self.input)


@dataclass(frozen=True, slots=True)
class DataShard:
    """The part of every window that this rank takes: that of replica `index`, cut into
    micro-batches.
    """

    shares: Sequence[int]  # one per replica
    index: int
    num_microbatches: int

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, shares: Sequence[int]) -> DataShard:
        """Return the part of a rank that has this place in the plan."""
        return cls(shares, mesh.replica, plan.num_microbatches)

    def cuts(self, count: int) -> list[range]:
        """Return this rank's micro-batches as offsets into a window of `count` samples. Some may be
        empty.
        """
        of_rank = split(count, self.shares)[self.index]
        return [
            range(of_rank.start + cut.start, of_rank.start + cut.stop)
            for cut in split(len(of_rank), [1] * self.num_microbatches)
        ]


def training_feed(
    job: Job,
    *,
    part: DataShard,
    steps: range,
    loader_workers: int = 0,
    order: Order | None = None,
) -> Iterator[tuple[Window, list[MicroBatch]]]:
    """Return the windows of these optimizer steps with this rank's micro-batches, on the CPU.

    Of a stream of unknown length, every rank reads the whole and keeps its part of each window, so
    that ranks can't disagree on where it ends. A resumed run reads up to its place again.

    order: the job's, from a caller that knows it.
    """
    if is_stream(job.data):
        if loader_workers:
            raise JobError(
                "an iterable data set is read by each rank itself; loader workers would read it again",
                hint="--loader-workers 0, or a data set with __len__ and __getitem__",
            )
        return _stream_feed(job, part=part, steps=steps)
    return _indexed_feed(job, order or Order.of(job), part, steps, loader_workers)


def _indexed_feed(
    job: Job, order: Order, part: DataShard, steps: range, loader_workers: int
) -> Iterator[tuple[Window, list[MicroBatch]]]:
    cuts = _Cuts(job, order, part, steps)
    microbatches: Iterator[MicroBatch] = (cuts[index] for index in range(len(cuts)))
    if loader_workers:
        loading = replace(job.loading or Loading(), num_workers=loader_workers)
        microbatches = map(_raised, _read_ahead(_Loaded(cuts), loading))
    for step in steps:
        yield order.window(step), list(islice(microbatches, part.num_microbatches))


class _Cuts(torch.utils.data.Dataset[MicroBatch]):
    """This rank's micro-batches of these steps as the items of a data set, so that loader workers
    make whole micro-batches.
    """

    def __init__(self, job: Job, order: Order, part: DataShard, steps: range) -> None:
        # Keep only parts of the job, because this object is sent to loader workers that are
        # spawned.
        self.data, self.collate, self.order, self.part, self.steps = (
            job.data,
            job.collate,
            order,
            part,
            steps,
        )
        self.draws = CollateDraws(order.seed)

    def __len__(self) -> int:
        return len(self.steps) * self.part.num_microbatches

    def __getitem__(self, index: int) -> MicroBatch:
        which_step, which_cut = divmod(index, self.part.num_microbatches)
        window = self.order.window(self.steps[which_step])
        cut = self.part.cuts(window.count)[which_cut]
        positions = window.positions[cut.start : cut.stop] or window.positions[:1]
        indices = self.order.indices(window.epoch, positions)
        collate, was_keyed = (
            value_at(self.collate, self.steps[which_step], window.epoch),
            self.draws.is_needed,
        )
        pair = fetch(
            self.data,
            indices,
            positions,
            collate=self.draws.keyed(collate, cut, window),
            seed=key_to_seed(self.order.seed, "sample", window.epoch),
        )
        if self.draws.is_needed != was_keyed:
            return self[index]
        named = (
            indices if self.order.drawn is None else positions
        )  # an audit does not know what a sampler drew
        return MicroBatch(
            *pair,
            samples=len(cut),
            digest=digest(window.epoch, positions[: len(cut)], named[: len(cut)]),
        )


def _read_ahead(loaded: _Loaded, loading: Loading) -> DataLoader[MicroBatch | PacelineError]:
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TEMPORARY:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        get_temp_dir()  # multiprocessing keeps it, also for forks, and removes it with this process
        tempfile.tempdir = before
    data = loaded.cuts.data
    return DataLoader(
        loaded,
        batch_size=None,
        num_workers=loading.num_workers,
        prefetch_factor=loading.prefetch_factor,
        timeout=loading.timeout_s,
        multiprocessing_context=loading.context,
        worker_init_fn=_WorkerInit(
            loading.init, data.dataset if isinstance(data, Opened) else data
        ),
    )


@dataclass(frozen=True)
class _WorkerInit:
    """The first work of a loader worker.

    It makes the worker end with its rank, however the rank ends. Otherwise a worker that hangs
    would stay for ever, and keep what it has of the rank, such as the lock of the run folder.
    """

    # The job's `worker_init_fn`. It finds the job's own data set as its worker's data set.
    init: Callable[[int], Any] | None
    data: Any

    def __call__(self, worker: int) -> None:
        die_with(os.getppid())
        signal.signal(signal.SIGTERM, _leave_to_rank)
        close_connections()
        if self.init is not None:
            object.__setattr__(
                torch.utils.data.get_worker_info(), "dataset", self.data
            )  # the worker's information refuses a plain assignment
            self.init(worker)


def _leave_to_rank(number: int, frame: Any) -> None:
    """Ignore a first SIGTERM; a second one ends the worker.

    A scheduler that asks all processes of a run to stop asks the rank too, and the rank ends its
    step and saves. torch would end the worker at once, and with it the step.
    """
    signal.signal(number, signal.SIG_DFL)


class _Loaded(torch.utils.data.Dataset[MicroBatch | PacelineError]):
    """The micro-batches that a loader worker sends. An error is sent as a value.

    The loader would turn an error and its trace into one long text. Its frames can't be sent, so
    the error carries their description.
    """

    def __init__(self, cuts: _Cuts) -> None:
        self.cuts = cuts

    def __len__(self) -> int:
        return len(self.cuts)

    def __getitem__(self, index: int) -> MicroBatch | PacelineError:
        try:
            return self.cuts[index]
        except PacelineError as error:
            failure = error
        except (
            SystemExit,
            KeyboardInterrupt,
            GeneratorExit,
        ) as error:  # it would end the worker without a message
            failure = TrainingError(f"the job's code ended a loader worker: {in_words(error)}")
            failure.__cause__ = error
        failure.where, failure.trace = user_frames(failure)[0], traced_cause(failure)  # type: ignore[attr-defined]
        return failure


def _raised(loaded: MicroBatch | PacelineError) -> MicroBatch:
    if isinstance(loaded, PacelineError):
        raise loaded
    return loaded


def _stream_feed(
    job: Job, *, part: DataShard, steps: range
) -> Iterator[tuple[Window, list[MicroBatch]]]:
    draws = CollateDraws(job.seed, is_needed=True)
    # A resumed run reads up to its place in the stream.
    windows = islice(_stream_windows(job), steps.start, steps.stop)
    for step, (window, items) in zip(steps, windows, strict=False):
        collate = value_at(job.collate, step, window.epoch)
        yield window, [_cut(items, cut, window, collate, draws) for cut in part.cuts(window.count)]


def _cut(
    items: Sequence[Any], cut: range, window: Window, collate: Collate | None, draws: CollateDraws
) -> MicroBatch:
    """Return these samples of a stream's window."""
    places = window.positions[cut.start : cut.stop]
    pair = collated(
        [items[offset] for offset in cut or [0]],
        draws.keyed(collate, cut, window),
        names=places or [window.start],
    )
    return MicroBatch(*pair, samples=len(cut), digest=digest(window.epoch, places, places))


def _stream_windows(job: Job) -> Iterator[tuple[Window, list[Any]]]:
    data, seed, drop_last, epochs, step = job.data, job.seed, job.drop_last, job.epochs, 0
    for epoch in count() if epochs is None else range(epochs):
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        seed_streams(seed, "stream", epoch, -1)
        items, start = iter(data), 0
        while True:
            seed_streams(
                seed, "stream", epoch, start
            )  # the same on every rank, whatever it drew since
            batch = value_at(job.batch, step, epoch)
            taken = list(islice(items, batch))
            if taken and not (drop_last and len(taken) < batch):
                yield Window(epoch, start, len(taken)), taken
                step += 1
            start += len(taken)
            if len(taken) < batch:
                break
        if start == 0 or (drop_last and start < batch):
            raise JobError(
                f"the data stream gave {start} samples in epoch {epoch}",
                hint="an iterable data set must give at least one batch each time it is iterated",
            )


def evaluation_feed(
    data: Any, *, batch: int, part: DataShard, seed: int, collate: Collate | None = None
) -> Iterator[MicroBatch]:
    """Yield every sample of the data exactly once over all ranks, in order. Each rank gets equally
    many micro-batches.
    """
    draws = CollateDraws(seed, is_needed=True)
    if is_stream(data):
        seed_streams(seed, "evaluation", 0)
        items, start = iter(data), 0
        while taken := list(islice(items, batch)):
            window = Window(_EVALUATION, start, len(taken))
            yield from (_cut(taken, cut, window, collate, draws) for cut in part.cuts(len(taken)))
            start += len(taken)
        return
    for first in range(0, len(data), batch):
        window = Window(_EVALUATION, first, min(batch, len(data) - first))
        for cut in part.cuts(window.count):
            used = [first + offset for offset in cut] or [first]
            pair = fetch(
                data,
                used,
                used,
                seed=key_to_seed(seed, "evaluation"),
                collate=draws.keyed(collate, cut, window),
            )
            yield MicroBatch(*pair, samples=len(cut))


def evaluated_part(data: Any, *, batch: int, part: DataShard) -> float:
    """Return a replica's fraction of the samples in `evaluation_feed`. If a stream doesn't know its
    length, use the replica's share.
    """
    if is_stream(data):
        return part.shares[part.index] / sum(part.shares)
    sizes = [min(batch, len(data) - first) for first in range(0, len(data), batch)]
    return sum(len(cut) for size in sizes for cut in part.cuts(size)) / len(data)


def example_batch(job: Job, samples: int, *, first: int = 0) -> MicroBatch:
    """Return a batch of training samples, from sample `first` on. If the data ends, it continues
    from the beginning.
    """
    data = job.data
    if is_stream(data):
        items = list(islice(iter(data), first + samples))
        if not items:
            raise JobError("the data stream gave no samples")
        places = [i % len(items) for i in range(first, first + samples)]
        return MicroBatch(
            *collated([items[i] for i in places], job.collate, names=places), samples=samples
        )
    places = [i % len(data) for i in range(first, first + samples)]
    return MicroBatch(*fetch(data, places, places, seed=0, collate=job.collate), samples=samples)


def is_stream(data: Any) -> bool:
    """Whether the data can only be read from its beginning."""
    return isinstance(data, IterableDataset) or not (
        hasattr(data, "__getitem__") and hasattr(data, "__len__")
    )


def fetch(
    data: Any,
    indices: Sequence[int],
    positions: Sequence[int],
    *,
    seed: int,
    collate: Collate | None = None,
) -> tuple[Any, Any]:
    """Return (input, target) of these samples as one batch, stacked along dim 0 unless the job
    collates them.

    Raises:
        TrainingError: a sample can't be read, is neither (input, target) nor an input, or doesn't
            stack with the others; or the job's collate failed.
    """
    while type(data) is Subset:  # `random_split` makes such data sets
        indices, data = [data.indices[index] for index in indices], data.dataset
    make = of_stacked(collate)
    rows = rows_of(data) if make is not None else None
    if make is not None and rows is not None and (collate is not None or is_sample(rows)):
        # What has no such rows or kernel is left to the samples, one by one, whose errors name them.
        with suppress(IndexError, RuntimeError):
            return make(taken(rows, indices))
    return collated(
        [
            _sample(data, index, position, seed)
            for index, position in zip(indices, positions, strict=True)
        ],
        collate,
        names=indices,
    )


def _sample(data: Any, index: int, position: int, seed: int) -> Any:
    seed_sample(seed, position)
    try:
        return data[index]
    except Exception as error:
        raise TrainingError(
            f"sample {index} of the data can't be read: {in_words(error)}",
            hint=closed_connections() or None,
        ) from error
