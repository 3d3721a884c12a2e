"""Conversion of a `torch.utils.data.DataLoader` to fields of a job.

No property of the loader is dropped silently.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.base.errors import JobError
from paceline.job.groups import DrawnGroups
from paceline.torch_private.data_loaders import as_worker, has_own_iterator

_ITSELF = "give the data set itself: data=loader.dataset, batch=, collate=, sampler="


@dataclass(frozen=True)
class Loading:
    """The options of a DataLoader with which loader workers of a rank read samples ahead."""

    num_workers: int = 0  # processes a rank
    # Called in each worker with its number; the data set is `get_worker_info().dataset`.
    init: Callable[[int], None] | None = None
    prefetch_factor: int | None = None
    timeout_s: float = 0.0  # seconds to wait for a batch; 0 for no limit
    context: Any = None  # how workers are started; None for torch's default


class Opened:
    """A data set that a loader's `worker_init_fn` may have to open.

    Some processes that read are no workers, such as a rank that evaluates. If such a process can't
    read its first sample, the function runs there as in the only worker.
    """

    def __init__(self, dataset: Any, init: Callable[[int], Any]) -> None:
        self.dataset, self.init, self.process = dataset, init, -1

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # of a copy in the making
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        from torch.utils.data import get_worker_info

        if self.process != os.getpid() and get_worker_info() is None:
            self.process = os.getpid()
            self._open(index)
        return self.dataset[index]

    def _open(self, index: Any) -> None:
        from paceline.base.streams import kept_streams

        with kept_streams():
            try:
                self.dataset[index]
            except Exception:
                with as_worker(self.dataset):
                    self.init(0)


def opened(dataset: Any, loader: Any) -> Any:
    """Return the data set of a loader in a form that every process can read, whether it is a worker
    or not.
    """
    is_read_by_index = (
        loader.worker_init_fn is not None and loader.num_workers and not is_stream(loader)
    )
    return Opened(dataset, loader.worker_init_fn) if is_read_by_index else dataset


def is_loader(value: Any) -> bool:
    """Whether the value is a DataLoader of torch, or a subclass; torch is not imported for it."""
    module = sys.modules.get("torch.utils.data")
    return module is not None and isinstance(value, module.DataLoader)


def training_fields(loader: Any) -> dict[str, Any]:
    """Return the fields of a job that correspond to a loader of training data.

    These are data, collate (None for torch's default), batch, drop_last, loading and sampler. The
    sampler is None for a shuffle of all samples, which a job does by itself.

    Raises:
        JobError: the loader does something that a job can't repeat on other numbers of ranks.
    """
    _refuse_unknown(loader)
    fields = {"data": loader.dataset, "collate": _collate(loader), "loading": _loading(loader)}
    if is_stream(loader):
        if loader.num_workers:
            raise JobError(
                f"data is a DataLoader over a stream with num_workers={loader.num_workers}: each worker "
                "reads a stream of its own, and what comes first depends on their number",
                hint="num_workers=0; pl.Shards splits files over ranks without that",
            )
        return {
            **fields,
            "batch": loader.batch_size,
            "drop_last": loader.drop_last,
            "loading": None,
        }
    return {**fields, **fields_of_groups(loader.batch_sampler, loader.dataset)}


def draws_groups(sampler: Any, seed: int) -> bool:
    """Whether a sampler is a batch sampler: torch's, or one whose first draw is a list of
    indices.
    """
    import torch.utils.data as torch_data

    from paceline.base.streams import seeded_for_epoch

    if isinstance(sampler, torch_data.BatchSampler):
        return True
    if (
        isinstance(sampler, DrawnGroups)
        or not hasattr(sampler, "__iter__")
        or type(sampler).__module__.startswith("torch.")
    ):
        return False
    with (
        suppress(Exception),
        seeded_for_epoch(sampler, seed, 0),
    ):  # what fails here fails where an epoch is drawn
        return isinstance(next(iter(sampler), None), list | tuple)
    return False


def fields_of_groups(groups: Any, data: Any) -> dict[str, Any]:
    """Return the sampler, batch and drop_last of a batch sampler.

    The batch is None if its groups are the steps.
    """
    if _draws_samples(groups):
        return {
            "sampler": None if _is_shuffle(groups.sampler, data) else groups.sampler,
            "batch": groups.batch_size,
            "drop_last": groups.drop_last,
        }
    return {"sampler": DrawnGroups(groups), "batch": None, "drop_last": False}


def evaluated(loader: Any, *, name: str) -> tuple[Any, Callable[..., Any] | None]:
    """Return the data set and the collate function of a loader of evaluation data.

    An evaluation uses every sample once.

    Raises:
        JobError: the loader would leave samples out, or draw some more than once.
    """
    from torch.utils.data import RandomSampler, SequentialSampler, Subset, SubsetRandomSampler

    _refuse_unknown(loader)
    if is_stream(loader):
        return loader.dataset, _collate(loader)
    groups = loader.batch_sampler
    if not _draws_samples(groups):
        raise JobError(
            f"{name} is a DataLoader with a batch sampler of its own, and an evaluation sees every sample "
            "once",
            hint=f"{name}=loader.dataset",
        )
    sampler = groups.sampler
    if groups.drop_last and len(sampler) % groups.batch_size:
        raise JobError(
            f"{name} is a DataLoader with drop_last=True, which leaves out "
            f"{len(sampler) % groups.batch_size} samples; an evaluation sees every sample once",
            hint="drop_last=False",
        )
    if type(sampler) is SubsetRandomSampler:
        return Subset(loader.dataset, list(sampler.indices)), _collate(loader)
    if (
        type(sampler) is SequentialSampler
        or _is_shuffle(sampler, loader.dataset)
        or (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and len(sampler) == len(loader.dataset)
        )
    ):
        return loader.dataset, _collate(loader)
    raise JobError(
        f"{name} is a DataLoader with a {type(sampler).__name__}, and an evaluation sees every sample once",
        hint=f"{name}=loader.dataset, or a torch.utils.data.Subset of it",
    )


def is_stream(loader: Any) -> bool:
    """Whether the data set of a loader has no indices."""
    from torch.utils.data import IterableDataset

    return isinstance(loader.dataset, IterableDataset)


def _refuse_unknown(loader: Any) -> None:
    from torch.utils.data import DataLoader

    kind: Any = type(loader)
    if has_own_iterator(kind):  # torch_geometric's loaders of neighbours
        raise JobError(
            f"the {kind.__name__} changes what its collate_fn made, in an iterator of its own",
            hint="give data=loader.dataset, and a collate= that makes the whole batch; for torch_geometric: "
            "collate=lambda items: loader.filter_fn(loader.collate_fn(items))",
        )
    if (
        kind.__iter__ is not DataLoader.__iter__
        and kind.__module__.partition(".")[0] != "torchdata"
    ):
        raise JobError(
            f"the {kind.__name__} has an __iter__ of its own, which may change or split its batches",
            hint=_ITSELF,
        )
    if loader.batch_size is None and (loader.batch_sampler is None or is_stream(loader)):
        raise JobError(
            "the DataLoader has batch_size=None: its data set makes whole batches, and plans cut batches by "
            "samples",
            hint="let an item of the data set be one sample, and give batch=",
        )


def _loading(loader: Any) -> Loading | None:
    if not loader.num_workers:
        return None
    return Loading(
        loader.num_workers,
        loader.worker_init_fn,
        loader.prefetch_factor,
        loader.timeout,
        loader.multiprocessing_context,
    )


def _collate(loader: Any) -> Callable[..., Any] | None:
    from torch.utils.data import default_collate

    return None if loader.collate_fn is default_collate else loader.collate_fn


def _draws_samples(groups: Any) -> bool:
    """Whether a batch sampler only cuts the draws of a sampler into batches."""
    from torch.utils.data import BatchSampler

    return type(groups) is BatchSampler and hasattr(groups.sampler, "__len__")


def _is_shuffle(sampler: Any, data: Any) -> bool:
    """Whether a sampler draws every sample once in an epoch, in random order, as a job does by
    itself.
    """
    from torch.utils.data import RandomSampler

    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.data_source is data
        and sampler.num_samples == len(data)
    )
