"""Models and losses that look past what shard=N leaves on a rank: exact, or refused by name with plans that work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jobs.stateful import in_turn, stateful_job, trained
from torch import Tensor, nn

import paceline
from paceline.base.errors import PlanRefused
from paceline.launch.process.failure import RankFailed


class Net(nn.Module):
    """Leaves a reference to itself and an auxiliary loss for a loss that looks at them."""

    built: list[Net] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)]), nn.Linear(8, 4)
        Net.built[:] = [self]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        output = self.last(x)
        self.aux = output.square().mean()
        return output


class Force(nn.Module):
    """The gradient of an energy by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Net()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        energy = self.energy(x).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0][:, :4].clone()


def penalised(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + 0.1 * sum(
        p.square().sum() for p in Net.built[0].parameters()
    )


def with_auxiliary(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) + 0.1 * Net.built[0].aux


class WithInput(Net):
    """Returns its input, too, for a penalty on the gradient by it."""

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_()
        return x, super().forward(x)


def penalised_by_input(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    x, y = output
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return F.mse_loss(y, target) + gradient.square().mean()


def unchecked(job: paceline.Job, plan: str, folder: Path) -> None:
    paceline.train(job, plan, run=folder / "run", timeout_s=60, check=False)


@pytest.mark.parametrize("plan", ["data=2", "shard=2 zero=2"])
@in_turn(lambda plan: stateful_job(Net, loss=penalised, steps=3))
def test_a_penalty_on_whole_weights_is_exact():
    """Where parameters are whole when the loss is computed."""


def test_a_penalty_on_sharded_weights_is_refused(tmp_path: Path):
    with pytest.raises(
        RankFailed,
        match=r"the loss uses parameters of the model(?s:.*)data=N plan, or shard=N zero=2",
    ):
        unchecked(stateful_job(Net, loss=penalised), "shard=2", tmp_path)


@pytest.mark.parametrize("plan", ["shard=2"])
@in_turn(lambda plan: stateful_job(Net, loss=with_auxiliary, steps=3))
def test_an_auxiliary_loss_is_exact():
    """It is a part of the forward's graph like the output."""


@pytest.mark.parametrize("plan", ["data=2"])
@in_turn(lambda plan: stateful_job(Force, steps=3))
def test_a_gradient_inside_the_forward_of_replicas():
    """Exact where they are whole."""


def test_a_gradient_inside_the_forward(tmp_path: Path):
    """Refused where it would set FSDP2's backward off."""
    with pytest.raises(
        RankFailed,
        match=r"goes back through what 'energy.blocks.1' returns(?s:.*)use a data=N plan",
    ):
        unchecked(stateful_job(Force), "shard=2", tmp_path)


@pytest.mark.parametrize("plan", ["data=2"])
@in_turn(lambda plan: stateful_job(WithInput, loss=penalised_by_input, steps=3))
def test_a_loss_that_goes_back_through_whole_replicas():
    """Exact where they are whole."""


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_loss_that_goes_back_through_the_model(zero: int, tmp_path: Path):
    """The blocks' weights are sharded again when the step's own backward comes."""
    with pytest.raises(
        RankFailed, match=r"goes back through what '.*' returns(?s:.*)use a data=N plan"
    ):
        unchecked(
            stateful_job(WithInput, loss=penalised_by_input), f"shard=2 zero={zero}", tmp_path
        )


def sharpened(output: Tensor, target: Tensor) -> Tensor:
    loss = F.mse_loss(output, target)
    return (
        loss
        + 0.1
        * torch.autograd.grad(loss * len(target), output, create_graph=True)[0].square().mean()
    )


@pytest.mark.parametrize("plan", ["shard=2"])
@in_turn(lambda plan: stateful_job(Net, loss=sharpened, steps=3))
def test_a_loss_that_goes_back_to_the_output_alone():
    """It passes no weights."""


class Popping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        return torch.tanh(self.linear(x)) + skips.pop()


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList([Popping(), Popping()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = [x, x * 2]
        for block in self.blocks:
            x = block(x, skips)
        return self.last(x)


def test_a_list_that_blocks_change(tmp_path: Path):
    """FSDP2 hands each block a copy of it."""
    with pytest.raises(
        RankFailed,
        match=r"'blocks.0' adds to a list or dict that it is given, or takes(?s:.*)data=N",
    ):
        unchecked(stateful_job(Skipping), "shard=2", tmp_path)


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


@pytest.mark.parametrize("plan", ["data=2 microbatches=2", "single microbatches=2"])
def test_batch_norm_on_single_samples_is_refused(plan: str, tmp_path: Path):
    """A last window of 2 samples is trained on whole, and not in micro-batches of one; the refusal comes before step
    1. Replicas with one micro-batch join their statistics."""
    job = stateful_job(batch_norm, samples=26, epochs=2, steps=None)
    with pytest.raises(
        RankFailed, match=r"cuts a window of 2 samples(?s:.*)drop_last=True"
    ) as refusal:
        unchecked(job, plan, tmp_path)
    assert "step" not in str(refusal.value).splitlines()[0]


def test_batch_norm_on_more_samples_trains(tmp_path: Path):
    """Short windows are no reason to refuse; nor are they where the run doesn't reach them, or for other norms."""
    jobs = {
        "long enough": stateful_job(batch_norm, samples=28, epochs=1, steps=None),
        "not reached": stateful_job(batch_norm, samples=26, steps=2),
        "another norm": stateful_job(
            lambda: nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)),
            samples=26,
            epochs=1,
            steps=None,
        ),
    }
    for name, job in jobs.items():
        trained(job, "data=2", tmp_path / name)


def test_a_refusal_is_a_plan_error():
    assert issubclass(PlanRefused, paceline.PacelineError)
