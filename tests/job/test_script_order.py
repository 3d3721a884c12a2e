"""A job that begins as a script that seeds torch: the same weights, and the same batches in all epochs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import paceline as pl
from paceline.base.errors import JobError
from paceline.base.streams import stream_states
from paceline.job.order import Order
from paceline.proof.order import windows
from paceline.training.prepare import build_model

SAMPLES, EPOCHS = 23, 4
DATA = TensorDataset(torch.arange(float(SAMPLES)), torch.arange(SAMPLES))


class ByHalves(Sampler[int]):
    """Draws by Python's generator; each epoch begins with another half."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        halves = [list(range(12)), list(range(12, SAMPLES))]
        for half in halves:
            random.shuffle(half)
        yield from halves[self.epoch % 2] + halves[1 - self.epoch % 2]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def sampled(make: Callable[[], Any], **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(DATA, batch_size=5, sampler=make(), **options)


def shuffled(**options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(DATA, batch_size=5, shuffle=True, **options)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffle": shuffled(),
    "short last batch left out": shuffled(drop_last=True),
    "generator of its own": lambda: DataLoader(DATA, 5, shuffle=True, generator=generator()),
    "generator of the sampler": lambda: DataLoader(
        DATA, 5, sampler=RandomSampler(DATA, generator=generator())
    ),
    "a worker": shuffled(num_workers=1),
    "a worker that stays": shuffled(num_workers=1, persistent_workers=True),
    "in order": lambda: DataLoader(DATA, batch_size=5),
    "with replacement": sampled(lambda: RandomSampler(DATA, replacement=True, num_samples=40)),
    "by weights": sampled(lambda: WeightedRandomSampler(range(1, SAMPLES + 1), 17)),
    "a subset": sampled(lambda: SubsetRandomSampler(range(3, 20))),
    "a sampler by random": sampled(ByHalves),
    "a batch sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=True)
    ),
    "a batch sampler of its own": lambda: DataLoader(DATA, batch_sampler=Uneven()),
}


class Uneven(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        drawn = torch.randperm(SAMPLES).tolist()
        yield from (drawn[:3], drawn[3:10], drawn[10:])


def net() -> nn.Module:
    return nn.Linear(3, 2)


def script(
    loader: Any, *models: Callable[[], nn.Module], test: DataLoader[Any] | None = None
) -> tuple[list[nn.Module], list[list[int]]]:
    """The models and the batches of a plain script."""
    random.seed(7)
    torch.manual_seed(7)
    built, batches = [build() for build in models], []
    for epoch in range(EPOCHS):
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)
        batches += [target.tolist() for _, target in loader]
        for _ in test or ():
            pass
    return built, batches


def job_of(data: Any, **fields: Any) -> pl.Job:
    return pl.Job(
        **{
            "model": net,
            "data": data,
            "loss": lambda output, target: output.sum(),
            "optimizer": torch.optim.SGD,
            "epochs": EPOCHS,
            "seed": pl.like_torch(7),
            **fields,
        }
    )


def batches_of(job: pl.Job) -> list[list[int]]:
    order, steps = Order.of(job), job.total_steps or 0
    taken = [order.window(step) for step in range(steps)]
    return [order.indices(window.epoch, window.positions) for window in taken]


@pytest.mark.parametrize("name", LOADERS)
def test_weights_and_batches_are_those_of_the_script(name: str):
    """Those of all epochs, whatever draws them, and also by the second implementation of a proof."""
    [model], batches = script(LOADERS[name](), net)
    job = job_of(LOADERS[name]())
    assert torch.equal(build_model(job, torch.device("cpu")).weight, model.weight)
    assert batches_of(job) == batches
    plainly = windows(job)
    assert [next(plainly)[2] for _ in batches] == batches


def test_a_loader_of_test_data_draws_at_the_end_of_each_epoch():
    """Each time it is iterated, and more if it shuffles."""
    for shuffle in (False, True):
        test = DataLoader(DATA, batch_size=10, shuffle=shuffle)
        _, batches = script(LOADERS["shuffle"](), net, test=test)
        assert batches_of(job_of(LOADERS["shuffle"](), validation=test)) == batches
    assert batches_of(job_of(LOADERS["shuffle"](), validation=DATA)) != batches


def test_data_without_a_loader_is_shuffled_as_one_would():
    """As by `DataLoader(data, batch_size=5, shuffle=True)`."""
    _, batches = script(LOADERS["shuffle"](), net)
    assert batches_of(job_of(DATA, batch=5)) == batches
    assert batches_of(job_of((DATA.tensors[0], DATA.tensors[1]), batch=5)) == batches


def test_epochs_in_any_order_are_drawn_alike():
    """A resumed run begins in the middle, and an earlier epoch may be asked for again."""
    job = job_of(LOADERS["generator of its own"]())
    batches, steps = batches_of(job), job.steps_per_epoch or 0
    for epoch in (2, 0, 3, 1, 1):
        drawn = Order.of(job).indices(epoch, range(SAMPLES))
        assert drawn == [index for batch in batches[epoch * steps :][:steps] for index in batch]


def test_several_models_are_built_one_after_the_other():
    """In the order of the mapping; the order of the samples begins after the last."""
    builders = {"generator": net, "critic": lambda: nn.Linear(2, 1)}
    built, batches = script(LOADERS["shuffle"](), *builders.values())
    job = job_of(
        LOADERS["shuffle"](),
        model=None,
        loss=None,
        optimizer=None,
        models=builders,
        optimizers=dict.fromkeys(builders, torch.optim.SGD),
        training_step=lambda ctx, batch: None,
    )
    named = dict(build_model(job, torch.device("cpu")).named_parameters())
    for name, model in zip(builders, built, strict=True):
        assert torch.equal(named[f"{name}.weight"], model.weight)
    assert batches_of(job) == batches


def test_the_generators_of_the_process_are_left_alone():
    """Those of torch, random and NumPy. The loader's own begins with its seed, whatever was drawn from it."""
    own = generator()
    loader = DataLoader(DATA, batch_size=5, shuffle=True, generator=own)
    _, batches = script(loader, net)
    job, states = job_of(loader), stream_states()
    assert batches_of(job) == batches
    assert str(stream_states()) == str(states)


def test_a_stream_has_its_own_order():
    """Only the weights are those of the script."""
    job = job_of(iter(DATA), batch=5)
    assert job.sampler is None
    assert torch.equal(build_model(job, torch.device("cpu")).weight, script([], net)[0][0].weight)


def test_a_changed_job_keeps_its_begin():
    """`dataclasses.replace` does not begin anew, and the seed is a number like others."""
    job = job_of(LOADERS["shuffle"]())
    changed = replace(job, epochs=2)
    assert changed.seed == 7 and type(changed.seed) is int
    assert batches_of(changed) == batches_of(job)[: len(batches_of(changed))]
    assert torch.equal(changed.model().weight, job.model().weight)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": nn.Linear(2, 2)}, "model must be a function"),
        ({"model": 3}, "model must be callable"),
        ({"seed": pl.like_torch(-1)}, "seed must be at least 0"),
        ({"models": ["net"]}, "models, optimizers and followers map names"),
    ],
)
def test_what_is_wrong_with_other_fields_is_told(fields: dict[str, Any], message: str):
    """As with any other seed."""
    with pytest.raises(JobError, match=message):
        job_of(DATA, batch=5, **fields)
