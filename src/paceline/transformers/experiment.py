"""Turn a Trainer into a job: its model, data in its order, loss, optimizer, schedule and length."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from paceline.base.errors import UsageError
from paceline.job import Job, Precision
from paceline.job.remade import Recipe
from paceline.torch_private.fake_tensors import detect_fake_mode
from paceline.transformers.compute_loss import ComputeLoss
from paceline.transformers.copies import copied
from paceline.transformers.cuts import batch_size, is_cut_by_sample, samples_of
from paceline.transformers.optimizers import follows_evaluations, schedule_of

_NO_LIMIT = sys.float_info.max  # Trainer reports the norm of gradients even if it doesn't clip them


def job_of(trainer: Any, loader: Any, *, steps: int) -> Job:
    """Return the job that a Trainer describes.

    Args:
        loader: The result of its `get_train_dataloader`.
    """
    args, sampler, parts = trainer.args, None, _parts(trainer, loader)
    is_stream = isinstance(parts["data"], IterableDataset)
    if not is_stream:
        drawn = loader.batch_sampler.sampler
        batch, drops_last = loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
        sampler = EpochSampler(
            drawn, len(loader) * batch if drops_last else len(drawn), seed=args.seed
        )
    return Job(
        **parts,
        sampler=sampler,
        steps=steps,
        optimizer=Recipe.of(trainer.optimizer, trainer.model),
        lr_schedule=None
        if follows_evaluations(trainer)
        else (lambda optimizer: schedule_of(trainer, optimizer, steps=steps)),
        batch=_batch(args, loader),
        clip=args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else _NO_LIMIT,
        drop_last=isinstance(parts["data"], CountedStream) and parts["data"].drop_last,
    )


def evaluation_of(trainer: Any, loader: Any) -> Job:
    """Return a job that is only evaluated and never trained.

    Args:
        loader: The result of `get_eval_dataloader`.
    """
    parts, batch = _parts(trainer, loader), trainer.args.per_device_train_batch_size
    data = parts["data"]
    # A plan needs a sample for each replica.
    if not isinstance(data, IterableDataset) and 0 < len(data) < batch:
        parts["data"] = Subset(data, [place % len(data) for place in range(batch)])
    collate = parts["collate"]
    parts["collate"] = lambda samples: (collate(samples), False, None)
    return Job(**parts, optimizer=torch.optim.SGD, batch=batch, steps=1)


def _parts(trainer: Any, loader: Any) -> dict[str, Any]:
    """Return the fields of a job that training and evaluation have in common."""
    data: Any
    if _draws_batches(loader):
        data, collate = LoaderStream(loader, trainer.args), joined
    else:
        data, collate = loader.dataset, loader.collate_fn
    if isinstance(data, IterableDataset) and not isinstance(data, LoaderStream):
        data = CountedStream(data, batch=_batch(trainer.args, loader), drop_last=loader.drop_last)
    return {
        "model": ModelOf(trainer),
        "data": data,
        "collate": collate,
        "compute": ComputeLoss(trainer),
        "precision": precision_of(trainer.args),
        "seed": trainer.args.seed,
    }


def _batch(args: Any, loader: Any) -> int:
    """Return the global batch, which does not depend on the number of devices."""
    sampler = getattr(loader, "batch_sampler", None)
    size = (
        getattr(sampler, "batch_size", None)
        or getattr(loader, "batch_size", None)
        or args.per_device_train_batch_size
    )
    return int(size * args.gradient_accumulation_steps)


def _draws_batches(loader: Any) -> bool:
    """Whether a loader itself decides which samples are a batch, instead of a sampler or the order
    of a stream.
    """
    if not isinstance(loader, DataLoader):
        return True
    if isinstance(loader.dataset, IterableDataset):
        return loader.batch_size is None
    return not hasattr(loader.batch_sampler, "sampler") or not hasattr(
        loader.batch_sampler, "batch_size"
    )


def precision_of(args: Any) -> Precision:
    """Return the precision of forwards; weights keep the model's own dtype."""
    if args.fp16:
        return "fp16"
    return "bf16" if args.bf16 else "tf32" if args.tf32 else "float32"


@dataclass(frozen=True)
class EpochPlace:
    """The place of a step in the data."""

    epoch: int
    step: int  # within the epoch, from 1
    is_last: bool  # whether it is the epoch's last step


class CountedStream(IterableDataset[Any]):
    """An iterable data set that knows how long each epoch was before it gives an epoch's last
    sample.
    """

    def __init__(self, data: Any, *, batch: int, drop_last: bool) -> None:
        self.data, self.batch, self.drop_last = data, batch, drop_last
        self._lengths: list[int] = []  # of the epochs that ended, in samples

    def __iter__(self) -> Iterator[Any]:
        count, latest = 0, None
        for sample in self.data:
            if count:
                yield latest
            latest, count = sample, count + 1
        self._lengths.append(count)
        if count:
            yield latest

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)

    def place(self, step: int) -> EpochPlace:
        """Return the place of a step of the run, counted from 1, whose samples were read."""
        for epoch, length in enumerate(self._lengths):
            whole, rest = divmod(length, self.batch)
            steps = whole + (1 if rest and not self.drop_last else 0)
            if step <= steps:
                return EpochPlace(epoch, step, step == steps)
            step -= steps
        return EpochPlace(len(self._lengths), step, False)


class LoaderStream(IterableDataset[Any]):
    """The samples from a loader, step by step: one pass yields the samples of one step's batches.

    A loader may draw from torch's global generator. The generator is seeded as Trainer seeds it,
    and only the loader draws from it.
    """

    def __init__(self, loader: Any, args: Any) -> None:
        self.loader, self.accumulated = loader, args.gradient_accumulation_steps
        self._drawn = torch.Generator().manual_seed(args.seed).get_state()
        self.most, self.step, self._read = _batch(args, loader), 0, 0
        if hasattr(loader, "__next__"):
            raise UsageError(
                f"the {type(loader).__name__} that get_train_dataloader gives can be read once",
                hint="each epoch, and each rank, reads it: give what has an __iter__",
            )
        self._steps, self._latest = self._by_steps(), list[dict[str, Any]]()

    def set_epoch(self, epoch: int) -> None:
        """Set the next step; a run calls this because it takes each pass for an epoch."""
        self.step = epoch

    def __iter__(self) -> Iterator[Any]:
        while self._read <= self.step:
            self._latest, self._read = next(self._steps), self._read + 1
        sizes = [batch_size(batch) for batch in self._latest]
        if sum(sizes) > self.most:
            raise UsageError(
                f"the {type(self.loader).__name__} gives batches of {sizes} samples for a step, more than "
                f"{self.most}, which per_device_train_batch_size and gradient_accumulation_steps say",
                hint="let per_device_train_batch_size be that of its largest batch",
            )
        for batch, size in zip(self._latest, sizes, strict=True):
            if not is_cut_by_sample(batch, size):
                raise UsageError(
                    f"a batch of the {type(self.loader).__name__} has an item without a part for each of "
                    f"its {size} samples, and a plan cuts batches",
                    hint="a DataLoader with a data set and a collate_fn collates what each rank has",
                )
            yield from (samples_of(batch, range(place, place + 1)) for place in range(size))

    def _by_steps(self) -> Iterator[list[dict[str, Any]]]:
        for epoch in count():
            if hasattr(self.loader, "set_epoch"):
                self.loader.set_epoch(epoch)
            batches, is_empty = self._batches(), True
            while of_step := list(islice(batches, self.accumulated)):
                yield of_step
                is_empty = False
            if is_empty:
                raise UsageError(f"the {type(self.loader).__name__} gave no batch in epoch {epoch}")

    def _batches(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of an epoch."""
        length = len(self.loader) if hasattr(self.loader, "__len__") else None
        batches: Any = None
        while True:
            with torch.random.fork_rng([]):
                torch.set_rng_state(self._drawn)
                # Batches beyond the loader's length are not read; Trainer does not read them either.
                batches = batches or islice(iter(self.loader), length)
                batch = next(batches, None)
                self._drawn = torch.get_rng_state()
            if batch is None:
                return
            yield dict(batch)


def joined(samples: list[Any]) -> Any:
    """Join samples that were cut from batches to one batch.

    Raises:
        UsageError: the samples have different sizes.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: joined([sample[key] for sample in samples]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(item for sample in samples for item in sample)
    if not isinstance(first, torch.Tensor) or not first.ndim:
        return first
    if len({sample.shape[1:] for sample in samples}) > 1:
        raise UsageError(
            f"batches of one step have samples of {first.shape[1:]} and of other sizes",
            hint="gradient_accumulation_steps=1, or a DataLoader with a data set and a collate_fn",
        )
    return torch.cat(samples)


@dataclass(eq=False)
class EpochSampler:
    """A sampler of torch, drawn for each epoch as Trainer draws it on one device.

    Accelerate seeds random samplers by the epoch and `data_seed`. Others draw from torch's global
    generator. Here it is seeded once and earlier epochs are drawn again, which equals Trainer as
    long as nothing else draws.

    Args:
        length: Of an epoch, without the samples of a last short batch that is left out.
        seed: The seed that Trainer gives the generator.
    """

    sampler: Any
    length: int
    seed: int
    epoch: int = 0

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
            return islice(iter(self.sampler), self.length)
        drawn: Iterable[int] = ()
        torch.manual_seed(self.seed)
        for _ in range(self.epoch + 1):
            torch.empty((), dtype=torch.int64).random_()  # as a DataLoader does for its workers
            drawn = list(self.sampler)
        return islice(iter(drawn), self.length)


class ModelOf:
    """Builds a rank's own copy of a Trainer's model.

    In a fake mode it returns the model itself, because real tensors must not be copied there. A
    rank is a fork, so it shares the memory of frozen weights with the others until it writes there.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.process = trainer, os.getpid()

    def __call__(self) -> torch.nn.Module:
        trainer = self.trainer
        model = (
            trainer.model
            if detect_fake_mode() is not None
            else copied(trainer.model, shares_frozen=os.getpid() != self.process)
        )
        model.train()
        return model
