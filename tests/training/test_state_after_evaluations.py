"""What the forwards of an evaluation change of a model: replicas hold the same after it, and what one device holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

ROWS = 40


class Limited(nn.Module):
    """A table whose rows a forward scales down to a norm, in evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(ROWS, 6, max_norm=0.5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x).sum(1))


class Counting(Limited):
    """Keeps the greatest index it has seen, in evaluations too, and how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.table.max_norm = None
        self.register_buffer("greatest", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.greatest.copy_(torch.maximum(self.greatest, x.max()))
        return super().forward(x)


def job_of(model: Callable[[], nn.Module]) -> paceline.Job:
    """Trains on the first half of the rows and evaluates on all of them, twice on the way and at the end."""
    generator = torch.Generator().manual_seed(1)
    seen = torch.randint(ROWS // 2, (16, 3), generator=generator)
    other = torch.arange(ROWS).reshape(-1, 4)
    return paceline.Job(
        model=model,
        data=TensorDataset(seen, torch.randn(16, 3, generator=generator)),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=8,
        steps=6,
        precision="float64",
        validation=TensorDataset(other, torch.zeros(len(other), 3)),
    )


def trained(job: paceline.Job, plan: str, folder: Path) -> dict[str, Tensor]:
    world_size = paceline.Plan.parse(plan).world_size
    paceline.train(job, plan, devices=f"cpu:0-{world_size - 1}", run=folder, timeout_s=60)
    return load_file(folder / "model.safetensors")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", ["data=2", "data=3", "data=2 shares=3:1", "tensor=2", "pipeline=2"]
)
@pytest.mark.parametrize("model", [Limited, Counting])
def test_it_is_one_device_s(model: Callable[[], nn.Module], plan: str, tmp_path: Path) -> None:
    """Each replica looks up other rows of the table than the others."""
    expected = trained(job_of(model), "single", tmp_path / "single")
    state = trained(job_of(model), plan, tmp_path / "plan")
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name].double(), tensor.double(), rtol=1e-10, atol=1e-12)


class Centred(nn.Module):
    """Keeps the mean of its inputs, which it changes in evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return self.layers(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["pipeline=2 shard=2 microbatches=1", "shard=2 zero=1", "shard=2", "data=2"]
)
def test_a_replica_that_had_no_samples_before_the_evaluation(plan: str, tmp_path: Path) -> None:
    """The epoch ends with one sample: the second replica computes a stand-in, which leaves nothing behind, and then
    its half of the evaluation, which does."""
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))

    def job() -> paceline.Job:
        return paceline.Job(
            model=Centred,
            data=TensorDataset(x, x[:, :3]),
            loss=F.mse_loss,
            batch=4,
            steps=3,
            precision="float64",
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            validation=TensorDataset(x[:8], x[:8, :3]),
        )

    expected = trained(job(), "single", tmp_path / "single")
    state = trained(job(), plan, tmp_path / "plan")
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)


def test_the_evaluations_matter() -> None:
    """The table is another one without them: else the test above would prove nothing."""
    job = job_of(Limited)
    model = Limited()
    model.eval()
    before = model.table.weight.detach().clone()
    model(job.validation.tensors[0])
    assert not torch.equal(before[ROWS // 2 :], model.table.weight[ROWS // 2 :])
