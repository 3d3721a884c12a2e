"""What training changes outside the model is there again after a resume, or named at the start."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import paceline
from paceline.checkpoint.values import from_text_tensor, text_tensor
from paceline.training.job_options import settings_notes
from paceline.training.job_state import _VALUES, JobState

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = X[:, :3].sin()
TALLY = {"calls": 0}


class Centred(nn.Module):
    """A buffer, a number, an attribute that comes with the first call, and a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3, dtype=torch.float64))
        self.count, self.queue = 0, deque([0.0], maxlen=2)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        self.center.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        self.scale = getattr(self, "scale", 1.0) * 0.9
        self.queue.append(self.count / 7)
        return F.mse_loss((output - self.center) * self.scale * sum(self.queue), target)


class Weighted:
    """An object with objects in it, generators, and an array."""

    def __init__(self) -> None:
        self.draws, self.python = np.random.default_rng(3), random.Random(4)
        self.parts, self.mean = [{"inner": Counter()}], np.zeros(3)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.mean += output.detach().mean(0).numpy()
        drawn = self.draws.random() + self.python.random() + torch.from_numpy(self.mean).sum()
        return F.mse_loss(output * (self.parts[0]["inner"]() + drawn), target)


class Counter:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


class Stateful:
    """Gives its state as torch's objects do; nothing else of it shows."""

    def __init__(self) -> None:
        seen: list[int] = []
        self.state_dict = lambda: {"seen": list(seen)}
        self.load_state_dict = lambda state: seen.__setitem__(slice(None), state["seen"])
        self.note = seen.append

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.note(len(self.state_dict()["seen"]) + 1)
        return F.mse_loss(output * sum(self.state_dict()["seen"]), target)


def in_closure() -> Callable[[Tensor, Tensor], Tensor]:
    count, mean = 0, torch.zeros((), dtype=torch.float64)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal count
        count += 1
        mean.add_(output.detach().mean())
        return F.mse_loss(output * count + mean, target)

    return loss


def tallied(output: Tensor, target: Tensor) -> Tensor:
    TALLY["calls"] += 1
    return F.mse_loss(output * TALLY["calls"], target)


class Curriculum:
    """Shows more of each sample with every batch."""

    calls = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        x, y = default_collate(samples)
        return x * (torch.arange(6) < self.calls), y


class BestSoFar:
    def __init__(self) -> None:
        self.best = 1e9

    def __call__(self, output: Tensor, target: Tensor) -> float:
        self.best = min(self.best, float(output.detach().abs().sum()))
        return self.best


class Environment:
    """Where an agent is, and what it draws."""

    def __init__(self) -> None:
        self.place, self.draws = torch.zeros(6, dtype=torch.float64), np.random.default_rng(0)

    def move(self) -> Tensor:
        self.place = self.place * 0.9 + torch.from_numpy(self.draws.standard_normal(6))
        return self.place


def agent() -> dict[str, Any]:
    environment = Environment()

    def step(ctx: Any, batch: Any) -> None:
        seen = environment.move()
        ctx.backward("net", batch, lambda output, part: F.mse_loss(output + seen[:3], part.target))
        ctx.update("net")

    return {
        "models": {"net": net},
        "optimizers": {"net": sgd},
        "training_step": step,
        "model": None,
        "optimizer": None,
        "loss": None,
        "validation": None,
        "metrics": {},
    }


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05)


def make_job(**changes: Any) -> paceline.Job:
    fields = {
        "model": net,
        "data": TensorDataset(X, Y),
        "loss": F.mse_loss,
        "optimizer": sgd,
        "batch": 8,
        "steps": 6,
        "precision": "float64",
        "validation": TensorDataset(X, Y),
        **changes,
    }
    return paceline.Job(**{name: value for name, value in fields.items() if value is not None})


def train(job: paceline.Job, run: Path, plan: str = "single", **options: Any) -> Any:
    return paceline.train(
        job, plan, devices=f"cpu:0-{paceline.Plan.parse(plan).world_size - 1}", run=run, **options
    )


FIELDS: dict[str, Callable[[], dict[str, Any]]] = {
    "module": lambda: {"loss": Centred()},
    "method": lambda: {"loss": Weighted().loss},
    "state-dict": lambda: {"loss": Stateful()},
    "closure": lambda: {"loss": in_closure()},
    "global": lambda: {"loss": tallied},
    "collate": lambda: {"collate": Curriculum(), "validation": None},
    "metric": lambda: {"metrics": {"best": paceline.whole(BestSoFar())}},
    "environment": agent,
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "plans"),
    [
        *((name, ("single", "single")) for name in FIELDS),
        ("module", ("pipeline=2 microbatches=1", "tensor=2")),
        ("metric", ("data=2", "single")),
    ],
)
def test_it_goes_on_where_it_was(name: str, plans: tuple[str, str], tmp_path: Path) -> None:
    """As in a run that went through: the same weights and figures."""
    whole = train(make_job(**FIELDS[name]()), tmp_path / "whole", steps=6)
    train(make_job(**FIELDS[name]()), tmp_path / "cut", plans[0], steps=3)
    cut = train(make_job(**FIELDS[name]()), tmp_path / "cut", plans[1], resume=True)

    expected = load_file(tmp_path / "whole" / "model.safetensors")
    for key, tensor in load_file(tmp_path / "cut" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-10, atol=1e-12)
    if name != "module":  # whose state moves with each evaluation
        assert cut.metrics == pytest.approx(whole.metrics, rel=1e-10)


def test_what_a_resumed_job_gives_otherwise_stays_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Training has not changed it; what can't be saved is named at the start."""
    values = iter(range(10**6))

    def job(scale: float) -> paceline.Job:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            next(values)
            return F.mse_loss(output * scale, target)

        return make_job(loss=loss, validation=None)

    train(job(1.0), tmp_path / "a", steps=3)
    train(job(2.0), tmp_path / "a", resume=True)
    train(make_job(validation=None), tmp_path / "b", steps=3)
    train(job(2.0), tmp_path / "b", resume=True)

    assert "checkpoints don't keep what training changes of loss.values" in capfd.readouterr().err
    first, second = (load_file(tmp_path / run / "model.safetensors") for run in "ab")
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_state_of_an_earlier_version_finds_its_place():
    """Its checkpoints call a step `step`; the state is that of `training_step` now."""
    job = make_job(**agent())
    before = JobState(job)
    environment = cell(job)
    environment.move()
    stored = before.stored()
    packed = from_text_tensor(stored[_VALUES])
    earlier = {name.replace("training_step", "step", 1): each for name, each in packed.items()}
    assert earlier.keys().isdisjoint(packed) and len(earlier) > 1
    stored[_VALUES] = text_tensor(earlier)

    again = make_job(**agent())
    checkpoint: Any = SimpleNamespace(tensors=stored, read=stored.__getitem__)
    assert list(JobState(again).restore(checkpoint)) == []
    assert torch.equal(cell(again).place, environment.place)
    assert torch.equal(cell(again).move(), environment.move())


def cell(job: paceline.Job) -> Environment:
    assert job.training_step is not None and job.training_step.__closure__ is not None
    found: Environment = job.training_step.__closure__[0].cell_contents
    return found


def test_settings_of_an_earlier_version_are_compared_by_their_present_names():
    notes = list(
        settings_notes({"step": "gan", "clip": 1.0}, {"training_step": "wgan", "clip": 1.0})
    )
    assert notes == ["training_step is wgan, and was gan"]
