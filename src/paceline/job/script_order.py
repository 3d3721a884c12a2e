"""Initial weights and an order of data as in a script that seeds torch, so that its losses can be
compared with those of a job.

Source: torch 2.11 and 2.13, `torch/utils/data/dataloader.py` and `sampler.py`. Each time a loader is
iterated it draws a seed for its workers, also if it has none, and then its sampler draws one. Both
draw from the loader's generator if it has one, and otherwise from the global one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.job import loaders
from paceline.job.groups import DrawnGroups

Pass = tuple[Any, Any]  # what a script iterates once in an epoch: a sampler, and its loader or None


class TorchSeed(int):
    """The seed that a script gives to `torch.manual_seed` before it builds its models."""


def like_torch(seed: int = 0) -> TorchSeed:
    """Return a job's seed with which it begins as a script that calls `torch.manual_seed(seed)`,
    builds its models, and then goes through its loaders in each epoch.

    The job gets the script's initial weights, under every plan, and the order in which a shuffled
    `DataLoader` gives its samples. Later epochs have the script's order only if nothing else draws
    from torch's generator on the CPU meanwhile, as dropout does. Each rank builds the models once
    more, to know the generator's state.
    """
    return TorchSeed(seed)


@dataclass(frozen=True)
class ScriptModel:
    """Builds a model as a script does that seeds once and then builds one model after the other."""

    seed: int
    builders: Sequence[Callable[[], Any]]  # of the models up to this one

    def __call__(self) -> Any:
        import numpy as np
        import torch

        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed & 0xFFFFFFFF)
        return [build() for build in self.builders][-1]


class ScriptOrder:
    """A sampler, or a batch sampler, that draws what the first of a script's passes draws.

    Args:
        build: Builds the script's models.
    """

    def __init__(self, build: Callable[[], Any], passes: Sequence[Pass]) -> None:
        self.build, self.passes, self.epoch = build, passes, 0
        holders = [each for one_pass in passes for each in one_pass]
        self.generators = [g for each in holders if (g := getattr(each, "generator", None))]
        # An epoch, and the states of the generators at its beginning.
        self.known: tuple[int, Any, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.passes[0][0])

    def __iter__(self) -> Iterator[Any]:
        from paceline.base.streams import drawing, kept_streams, set_streams

        with kept_streams(), drawing():
            if self.known is None or self.known[0] > self.epoch:
                self.build()
                for generator in self.generators:
                    generator.manual_seed(generator.initial_seed())
                self.known = self._before(0)
            while True:
                epoch, streams, own = self.known
                set_streams(streams)
                for generator, state in zip(self.generators, own, strict=True):
                    generator.set_state(state)
                drawn, *_ = [_drawn(*each, epoch) for each in self.passes]
                if epoch == self.epoch:
                    return iter(drawn)
                self.known = self._before(epoch + 1)

    def _before(self, epoch: int) -> tuple[int, Any, Any]:
        from paceline.base.streams import stream_states

        return epoch, stream_states(), [generator.get_state() for generator in self.generators]


def _drawn(sampler: Any, loader: Any, epoch: int) -> list[Any]:
    """Draw an epoch as torch's loader does, from the generators in their current states."""
    import torch

    if not (epoch and getattr(loader, "persistent_workers", False)):
        torch.empty((), dtype=torch.int64).random_(generator=getattr(loader, "generator", None))
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return list(sampler)


def begun(job: Any, data: Any, sampler: Any) -> dict[str, Any]:
    """Return the fields of a job that begins as a script does, in place of those that it has.

    Args:
        job: As it was given.
        data: Its data set.
        sampler: The one that follows from its fields; None for a shuffle of all samples.
    """
    from torch.utils.data import IterableDataset, RandomSampler

    models = job.models or {"": job.model}
    if not isinstance(models, Mapping) or not all(
        isinstance(build, type) or (callable(build) and not hasattr(build, "named_parameters"))
        for build in models.values()
    ):
        return {}  # the job is refused
    names, builders = list(models), tuple(models.values())
    built = {name: ScriptModel(job.seed, builders[: n + 1]) for n, name in enumerate(names)}
    fields: dict[str, Any] = {"models": built} if job.models else {"model": built[""]}
    fields["seed"] = int(job.seed)
    is_indexed = hasattr(data, "__len__") and not isinstance(data, IterableDataset)
    if not is_indexed or hasattr(sampler, "num_replicas"):
        return fields
    loader = job.data if loaders.is_loader(job.data) else None
    if sampler is None:
        sampler = RandomSampler(data) if loader is None else loader.batch_sampler.sampler
    passes = [(getattr(sampler, "groups", sampler), loader)]
    if loaders.is_loader(test := job.validation):
        passes.append((() if loaders.is_stream(test) else test.batch_sampler, test))
    order: Any = ScriptOrder(built[names[-1]], passes)
    return {**fields, "sampler": DrawnGroups(order) if isinstance(sampler, DrawnGroups) else order}
