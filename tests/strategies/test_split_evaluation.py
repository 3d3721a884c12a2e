"""Models that run otherwise in an evaluation than in training, under plans that split them: evaluated as on one device,
or refused before step 1."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import odd_models as odd
import pytest
import torch
from jobs.perceptrons import ResidualNet
from torch import Tensor, nn
from torch.utils.data import Subset

import paceline
from paceline.launch.process.failure import RankFailed
from paceline.proof.reference_loop import PlainRun

PLANS = (
    "pipeline=2 microbatches=1",
    "place=2",
    "tensor=2",
    "pipeline=3 microbatches=1 schedule=zero-bubble",
    "pipeline=2 shard=2 microbatches=1",
)


class Scaled(ResidualNet):
    """Calls its first layer twice, once without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.first(x).norm(dim=1, keepdim=True)
        x = self.first(x) / (1 + scale)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Following(nn.Module):
    """A frozen net that follows a trained one, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.online = ResidualNet()
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                    q.lerp_(p, 0.1)
        return self.online(x) + self.target(x)


class Equilibrium(nn.Module):
    """Finds a fixed point without gradients, then calls the cell once more with one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.cell, self.o = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.a(x), torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(4):
                z = torch.tanh(0.5 * self.cell(z) + x)
        return self.o(torch.tanh(0.5 * self.cell(z) + x))


class AnotherOrder(ResidualNet):
    """Runs its blocks backwards in an evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks if self.training else reversed(self.blocks):
            x = block(x)
        return self.last(x)


class Averaged(ResidualNet):
    """Evaluates with averages of its last layer's weights, in buffers."""

    def __init__(self) -> None:
        super().__init__(count=3)
        self.register_buffer("average", self.last.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.lerp_(self.last.weight, 0.5)
            return super().forward(x)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.average, self.last.bias)


class AverageElsewhere(Averaged):
    """The average is of the last layer, and an evaluation uses it before the first one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else x + self.average.sum(0))


class Warm(nn.Module):
    """Lets more through the more often it was trained, which it counts in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += int(self.training)
        return x * (1 - 0.5**self.calls)


class Warmed(ResidualNet):
    """Has a module without weights that keeps state, and calls it once more in an evaluation, first of all."""

    def __init__(self) -> None:
        super().__init__()
        self.warm = Warm()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x if self.training else self.warm(x))
        for block in self.blocks:
            x = block(x)
        return self.last(self.warm(x))


class EvaluationHead(ResidualNet):
    """Has a layer that no training runs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.scale(super().forward(x))


def job_of(model: Callable[[], nn.Module]) -> paceline.Job:
    job = odd.job_of(model, batch=2)
    return replace(job, validation=Subset(job.data, range(3)))


def validation_loss(model: Callable[[], nn.Module], plan: str, folder: Path) -> float:
    job = job_of(model)
    world_size = paceline.Plan.parse(plan).world_size
    summary = paceline.train(job, plan, devices=f"cpu:0-{world_size - 1}", run=folder, timeout_s=60)
    return float(summary["validation_loss"])


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *(
            (model, plan)
            for model in (Scaled, Following, Equilibrium, AnotherOrder, Warmed)
            for plan in PLANS
        ),
        *((EvaluationHead, plan) for plan in odd.SPLITS),
    ],
)
def test_the_loss_of_an_evaluation(
    model: Callable[[], nn.Module], plan: str, tmp_path: Path
) -> None:
    job = job_of(model)
    plain = PlainRun(job)
    for _ in plain.steps(job.total_steps):
        pass
    assert validation_loss(model, plan, tmp_path / "plan") == pytest.approx(
        plain.evaluate(job.validation)["loss"], rel=1e-10
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", [Averaged, AverageElsewhere])
def test_a_layer_whose_place_has_two_parts(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    """The average follows at the beginning of a forward, on another rank than the layer that it is of: an evaluation
    would need both."""
    test_the_loss_of_an_evaluation(model, "tensor=2", tmp_path)
    with pytest.raises(
        RankFailed, match="an evaluation runs 'last' otherwise than training does"
    ) as refused:
        validation_loss(model, "place=2", tmp_path / "refused")
    assert (refused.value.failure.kind, refused.value.failure.step) == ("PlanRefused", 0)
