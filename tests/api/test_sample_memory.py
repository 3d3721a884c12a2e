"""A data set that remembers gives other samples on ranks that read a part of it: such plans are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import paceline
from paceline.api import checks
from paceline.base.errors import PlanRefused
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.planner.resolve import Resolved
from paceline.strategies.plan import Plan

pytestmark = pytest.mark.checked_runs


class Samples(Dataset[Any]):
    """Seventeen samples, each changed at random."""

    def __init__(self) -> None:
        self.x = torch.randn(17, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.memory: dict[int, Any] = {}
        self.generator, self.torch_generator = (
            np.random.default_rng(0),
            torch.Generator().manual_seed(0),
        )

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.changed(index), index % 2

    def changed(self, index: int) -> torch.Tensor:
        return self.x[index] + torch.randn(3) + random.random() + np.random.rand()


class CachedBefore(Samples):
    def changed(self, index: int) -> torch.Tensor:
        return self.memory.setdefault(index, self.x[index] * 2) + torch.randn(3)


class CachedAfter(Samples):
    def changed(self, index: int) -> torch.Tensor:
        if index not in self.memory:
            self.memory[index] = super().changed(index)
        return self.memory[index]


class OwnGenerator(Samples):
    def changed(self, index: int) -> torch.Tensor:
        return self.x[index] + self.generator.normal()


class OwnTorchGenerator(Samples):
    def changed(self, index: int) -> torch.Tensor:
        return self.x[index] + torch.rand((), generator=self.torch_generator)


class MixedWithTheLast(Samples):
    """Mixes a sample with the one that was read before."""

    def changed(self, index: int) -> torch.Tensor:
        before, self.memory[0] = self.memory.get(0, 0.0), self.x[index]
        return self.x[index] + before


class Unseeded(Samples):
    """Other samples each time, in each process: no plan repeats them."""

    def changed(self, index: int) -> torch.Tensor:
        return self.x[index] + np.random.default_rng().normal()


def train(run: Path, data: Any, *, plan: str = "data=2", epochs: int = 2, **options: Any) -> Any:
    fields = {name: options.pop(name) for name in ("validation", "collate") if name in options}
    job = paceline.Job(
        model=lambda: nn.Linear(3, 2),
        data=data,
        loss=nn.functional.cross_entropy,
        batch=6,
        epochs=epochs,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        precision="float64",
        **fields,
    )
    return paceline.train(job, plan=plan, run=run, table=False, **options)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (CachedAfter, {}),
        (CachedAfter, {"plan": "tensor=2"}),
        (CachedAfter, {"plan": "single", "loader_workers": 2}),
        (OwnGenerator, {"epochs": 1}),
        (OwnTorchGenerator, {"plan": "servers=1 workers=2"}),
        (MixedWithTheLast, {}),
    ],
)
def test_a_data_set_that_remembers_is_refused(
    kind: type[Samples], options: dict[str, Any], tmp_path: Path
):
    """Before the first step, on whatever device, with the ways that work."""
    with pytest.raises(
        PlanRefused, match="data gives other samples after some were read before"
    ) as raised:
        train(tmp_path / "run", kind(), **options)
    assert "--check no" in str(raised.value) and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_it_is_refused_on_gpus_too(tmp_path: Path):
    """Before a step is taken there."""
    job = paceline.Job(
        model=lambda: nn.Linear(3, 2),
        data=CachedAfter(),
        loss=nn.functional.cross_entropy,
        batch=6,
        epochs=2,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    gpus = Cluster(tuple(Device("cuda", index, 2**30, name="H200") for index in range(2)))
    with pytest.raises(PlanRefused, match="data gives other samples"):
        checks.first_update(
            job, None, Resolved(Plan.parse("data=2"), gpus, (1, 1)), environment=None, timeout_s=60
        )


def test_validation_data_and_collate_functions_remember_too(tmp_path: Path):
    """What they give is compared as well."""
    with pytest.raises(PlanRefused, match="validation gives other samples"):
        train(tmp_path / "a", Samples(), validation=OwnGenerator())
    drawn = np.random.default_rng(0)
    with pytest.raises(PlanRefused, match="data gives other samples"):
        train(
            tmp_path / "b",
            Samples(),
            collate=lambda items: (
                torch.stack([x for x, _ in items]) * drawn.normal(),
                torch.tensor([y for _, y in items]),
            ),
        )


@pytest.mark.slow
def test_what_is_random_by_the_seed_trains(tmp_path: Path):
    """Caches of what is read, random changes by the seeded generators, caches that are read in one epoch alone, and
    what no seed fixes are not refused; nor is a plan with one reader."""
    for number, (kind, options) in enumerate(
        (
            (Samples, {}),
            (CachedBefore, {}),
            (Unseeded, {}),
            (CachedAfter, {"epochs": 1}),
            (CachedAfter, {"loader_workers": 1}),
        )
    ):
        train(tmp_path / str(number), kind(), **{"plan": "single", "loader_workers": 2, **options})
    train(tmp_path / "unchecked", CachedAfter(), check=False)
