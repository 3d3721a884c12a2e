"""Batch norms under plans that cut the batch: replicas join their statistics, and compute what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.utils.data import TensorDataset

import paceline
from paceline.base.errors import PacelineError
from tests.corpus.registry import FEATURES, Net, make_job, numbers

EXACT = 1e-9
DATA = TensorDataset(
    numbers(15, FEATURES), numbers(15, 3, seed=3)
)  # a window of 12, and one of three


class Images(nn.Module):
    """Rows as images, through batch norms of one, two and three dims, with and without statistics that are kept, and an
    instance norm that keeps some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, 3)
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm1d(16),
                nn.BatchNorm2d(2, momentum=None),
                nn.BatchNorm3d(2, affine=False),
                nn.BatchNorm1d(4, track_running_stats=False),
                nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, shape in zip(
            self.norms, [(16,), (2, 2, 4), (2, 2, 2, 2), (4, 4), (4, 4)], strict=True
        ):
            x = norm(x.reshape(-1, *shape)).tanh()
        return self.last(x.flatten(1))


class ByHand(nn.BatchNorm1d):
    """With a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return batch_norm(
            x, self.running_mean, self.running_var, 1.1 * self.weight, self.bias, self.training, 0.2
        )


class Operator(nn.Module):
    """torch's own operator, of which no module tells."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("variance", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.batch_norm(
            x, None, None, self.mean, self.variance, self.training, 0.1, 1e-5, False
        )


class Sloped(nn.Module):
    """Returns a gradient of its output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            output = self.net(x)
            (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return torch.cat([output[:, :1], slope[:, :2]], 1)


class Tuned(Net):
    """One block is frozen as in fine-tuning, the others are not."""

    def __init__(self) -> None:
        super().__init__(
            lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))
        )

    def train(self, mode: bool = True) -> Tuned:
        super().train(mode)
        self.blocks[0].eval()
        return self


def of_blocks(make: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Net(lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), make(FEATURES)))


def job_of(model: Callable[[], nn.Module], **fields: Any) -> paceline.Job:
    return replace(make_job(model, data=DATA, validation=DATA, steps=4), **fields)


def state_after(job: paceline.Job, plan: str, run: Path) -> tuple[dict[str, Tensor], float]:
    result = paceline.train(job, plan, check=False, run=run / plan)
    return result.model().state_dict(), result["validation_loss"]


def assert_equal_to_one_device(job: paceline.Job, folder: Path, *plans: str) -> None:
    expected, loss = state_after(job, "single", folder)
    for plan in plans:
        state, plan_loss = state_after(job, plan, folder)
        assert plan_loss == pytest.approx(loss, rel=EXACT), plan
        for name, value in expected.items():
            torch.testing.assert_close(
                state[name], value, rtol=0.0, atol=EXACT, msg=f"{name} under {plan}"
            )


@pytest.mark.sweep(1)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # an instance norm returns a view
@pytest.mark.parametrize(
    ("model", "plans"),
    [
        (Images, ("data=2", "data=2 shares=11:1", "shard=2 zero=3")),
        (of_blocks(ByHand), ("data=3",)),
        pytest.param(of_blocks(ByHand), ("data=2 tensor=2",), marks=pytest.mark.slow),
        (of_blocks(Operator), ("data=2 recompute=full", "data=2 pipeline=2 microbatches=1")),
        (Sloped, ("data=2 shares=11:1",)),
        (Tuned, ("shard=3",)),
    ],
    ids=[
        "of all kinds",
        "with a forward of its own",
        "with a forward of its own in a split model",
        "operator",
        "gradient of a gradient",
        "partly frozen",
    ],
)
def test_statistics_are_those_of_all_replicas(
    model: Callable[[], nn.Module], plans: tuple[str, ...], tmp_path: Path
) -> None:
    """The last window has three samples: some replicas have one of them or none. The process has exported such layers
    before, as a job's file may."""
    torch.export.export(nn.BatchNorm1d(3), (torch.randn(4, 3),))
    assert_equal_to_one_device(job_of(model), tmp_path, *plans)


class ActNorm(nn.Module):
    """Sets its scale and its bias by the first batch, and counts forwards."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale, self.bias = (
            nn.Parameter(torch.ones(features)),
            nn.Parameter(torch.zeros(features)),
        )
        self.register_buffer("is_set", torch.zeros((), dtype=torch.uint8))
        self.register_buffer("mean", torch.zeros(features))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
            if not self.is_set:
                self.bias.data.copy_(-x.mean(0))
                self.scale.data.copy_(1 / x.std(0, correction=0))
                self.is_set.fill_(1)
        return (x + self.bias) * self.scale * (1 + self.forwards / 100)


@pytest.mark.slow
@pytest.mark.checked_runs
def test_what_is_set_by_the_first_batch_is_set_by_all_of_it(tmp_path: Path) -> None:
    """Each replica has other samples of it, and some have one or none. What every forward changes goes on from where it
    was."""
    few = TensorDataset(*(tensor[:4] for tensor in DATA.tensors))
    norms = lambda features: nn.Sequential(  # noqa: E731
        ActNorm(features), nn.Dropout(0.0), nn.BatchNorm1d(features)
    )
    job = job_of(of_blocks(norms))

    assert_equal_to_one_device(job, tmp_path / "many", "data=2 shares=3:1", "shard=3")
    assert_equal_to_one_device(replace(job, data=few), tmp_path / "few", "data=3 shares=2:1:1")
    assert (
        paceline.train(
            job_of(of_blocks(lambda features: nn.Sequential(ActNorm(features), nn.Dropout(0.5)))),
            "data=2",
            run=tmp_path / "checked",
        )["check"]["verdict"]
        == "passed"
    )


class PlanChoice(nn.Module):
    """Which of two batch norms runs depends on the samples, and how often."""

    def __init__(self, times: Callable[[int], int]) -> None:
        super().__init__()
        self.times, self.last = times, nn.Linear(FEATURES, 3)
        self.norms = nn.ModuleList(nn.BatchNorm1d(FEATURES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kind = int(x[0, 0] > 0)
        for _ in range(self.times(kind)):
            x = self.norms[kind](x)
        return self.last(x)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("times", [lambda kind: 1, lambda kind: 1 + kind, lambda kind: 2 - kind])
def test_replicas_that_take_other_courses_say_so(
    times: Callable[[int], int], tmp_path: Path
) -> None:
    """They would wait for each other for ever, or join what does not belong together. Micro-batches don't wait."""
    x = numbers(48, FEATURES)
    x[:, 0] = torch.arange(48) % 2 - 0.5
    job = job_of(
        lambda: PlanChoice(times), data=TensorDataset(x, x[:, :3]), validation=None, steps=5
    )

    with pytest.raises(PacelineError, match=r"come to different batch norms(.|\n)*microbatches=2"):
        paceline.train(job, "data=2", check=False, run=tmp_path / "joined", timeout_s=30)
    assert (
        paceline.train(job, "data=2 microbatches=2", check=False, run=tmp_path / "apart")["steps"]
        == 5
    )
