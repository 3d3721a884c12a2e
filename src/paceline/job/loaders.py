"""A `torch.utils.data.DataLoader` taken apart into the fields of a job; nothing of it is dropped silently."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.errors import JobError

_ITSELF = "give the data set itself: data=loader.dataset, batch=, collate=, sampler="


@dataclass(frozen=True)
class Loading:
    """How processes of a rank read samples ahead, as a DataLoader says it.

    num_workers: processes a rank. init: called in each of them with its number, and the data set as
        `get_worker_info().dataset`. timeout_s: for a batch; 0 for none. context: how they are started; None for torch's
        default.
    """

    num_workers: int = 0
    init: Callable[[int], None] | None = None
    prefetch_factor: int | None = None
    timeout_s: float = 0.0
    context: Any = None


def is_loader(value: Any) -> bool:
    """Whether the value is a DataLoader of torch, or a subclass; torch is not imported for it."""
    module = sys.modules.get("torch.utils.data")
    return module is not None and isinstance(value, module.DataLoader)


def training_fields(loader: Any) -> dict[str, Any]:
    """Fields of a job that say what a loader of training data says.

    data, collate (None for torch's default), batch, drop_last, loading, and sampler: None for a shuffle of all samples,
    which is a job's own.

    Raises:
        JobError: the loader does what a job can't repeat on other numbers of ranks.
    """
    _refuse_unknown(loader)
    fields = {"data": loader.dataset, "collate": _collate(loader), "loading": _loading(loader)}
    if is_stream(loader):
        if loader.num_workers:
            raise JobError(f"data is a DataLoader over a stream with num_workers={loader.num_workers}: each worker "
                           "reads a stream of its own, and what comes first depends on their number",
                           hint="num_workers=0; pl.Shards splits files over ranks without that")
        return {**fields, "batch": loader.batch_size, "drop_last": loader.drop_last, "loading": None}
    groups = loader.batch_sampler
    if _draws_samples(groups):
        return {**fields, "sampler": None if _is_shuffle(groups.sampler, loader.dataset) else groups.sampler,
                "batch": groups.batch_size, "drop_last": groups.drop_last}
    return {**fields, "sampler": DrawnGroups(groups), "batch": None, "drop_last": False}


def evaluated(loader: Any, *, name: str) -> tuple[Any, Callable[..., Any] | None]:
    """The data set and the collate function of a loader of evaluation data, every sample of which is evaluated once.

    Raises:
        JobError: the loader would leave samples out, or draw some more than once.
    """
    from torch.utils.data import RandomSampler, SequentialSampler, Subset, SubsetRandomSampler

    _refuse_unknown(loader)
    if is_stream(loader):
        return loader.dataset, _collate(loader)
    groups = loader.batch_sampler
    if not _draws_samples(groups):
        raise JobError(f"{name} is a DataLoader with a batch sampler of its own, and an evaluation sees every sample "
                       "once", hint=f"{name}=loader.dataset")
    sampler = groups.sampler
    if groups.drop_last and len(sampler) % groups.batch_size:
        raise JobError(f"{name} is a DataLoader with drop_last=True, which leaves out "
                       f"{len(sampler) % groups.batch_size} samples; an evaluation sees every sample once",
                       hint="drop_last=False")
    if type(sampler) is SubsetRandomSampler:
        return Subset(loader.dataset, list(sampler.indices)), _collate(loader)
    if type(sampler) is SequentialSampler or _is_shuffle(sampler, loader.dataset) or (
            type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset)):
        return loader.dataset, _collate(loader)
    raise JobError(f"{name} is a DataLoader with a {type(sampler).__name__}, and an evaluation sees every sample once",
                   hint=f"{name}=loader.dataset, or a torch.utils.data.Subset of it")


class DrawnGroups:
    """What a batch sampler draws, as a sampler of its samples: groups of one size, one after the other.

    Raises:
        JobError: a group that is not the last of an epoch has another size than the first.
    """

    def __init__(self, groups: Any) -> None:
        self.groups = groups
        self.generator = _generator(groups)
        self.size, self._length = 0, 0  # of a group and of an epoch, once they are drawn

    def set_epoch(self, epoch: int) -> None:
        for drawing in (self.groups, getattr(self.groups, "sampler", None)):
            if (tell := getattr(drawing, "set_epoch", None)) is not None:
                tell(epoch)

    def measure(self, seed_streams: Callable[[], None]) -> None:
        """Draw an epoch, to know the size of its groups and its length. seed_streams: seeds what it may draw from."""
        seed_streams()
        drawn = [list(group) for group in self.groups]
        self.size, self._length = len(drawn[0]) if drawn else 0, sum(map(len, drawn))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        short: int | None = None
        for number, group in enumerate(self.groups):
            indices = list(group)
            if short is not None or len(indices) > self.size:
                raise JobError(
                    f"the batch sampler {type(self.groups).__name__} draws groups of other sizes: group "
                    f"{number if short is None else number - 1} has {len(indices) if short is None else short} samples "
                    f"and others have {self.size}",
                    hint="all groups of an epoch but the last must have one size, as every optimizer step takes batch= "
                         "samples: leave out short groups (drop_last), or let an item be several samples")
            short = len(indices) if len(indices) < self.size else None
            yield from indices


def is_stream(loader: Any) -> bool:
    """Whether its data set has no indices."""
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def _refuse_unknown(loader: Any) -> None:
    from torch.utils.data import DataLoader

    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ and kind.__module__.partition(".")[0] != "torchdata":
        raise JobError(f"the {kind.__name__} has an __iter__ of its own, which may change or split its batches",
                       hint=_ITSELF)
    if loader.batch_size is None and (loader.batch_sampler is None or is_stream(loader)):
        raise JobError("the DataLoader has batch_size=None: its data set makes whole batches, and plans cut batches by "
                       "samples", hint="let an item of the data set be one sample, and give batch=")


def _loading(loader: Any) -> Loading | None:
    if not loader.num_workers:
        return None
    return Loading(loader.num_workers, loader.worker_init_fn, loader.prefetch_factor, loader.timeout,
                   loader.multiprocessing_context)


def _collate(loader: Any) -> Callable[..., Any] | None:
    from torch.utils.data import default_collate

    return None if loader.collate_fn is default_collate else loader.collate_fn


def _draws_samples(groups: Any) -> bool:
    """Whether a batch sampler does no more than cut what a sampler draws."""
    from torch.utils.data import BatchSampler

    return type(groups) is BatchSampler and hasattr(groups.sampler, "__len__")


def _is_shuffle(sampler: Any, data: Any) -> bool:
    """Whether a sampler draws every sample once in an epoch, by chance: that is a job's own order."""
    from torch.utils.data import RandomSampler

    return (type(sampler) is RandomSampler and not sampler.replacement and sampler.data_source is data
            and sampler.num_samples == len(data))


def _generator(groups: Any) -> Any:
    """The generator that groups are drawn from, of the batch sampler or of the sampler in it."""
    return getattr(groups, "generator", None) or getattr(getattr(groups, "sampler", None), "generator", None)
