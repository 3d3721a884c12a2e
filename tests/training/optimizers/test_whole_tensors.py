"""Optimizers that look at whole tensors, or at all of them, end where one device ends; or the plan is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from jobs.optimizers import (
    GlobalNorm,
    Lamb,
    Net,
    Shampoo,
    StackedNorm,
    Wrapped,
    furthest,
    optimizer_job,
    train,
    train_in_legs,
)
from torch import Tensor, nn

import paceline
from paceline.launch.process.failure import RankFailed
from paceline.training.optimizers import gather

EXACT = 1e-12


def adafactor(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(named, lr=0.05)


def muon_alone(named: Any) -> torch.optim.Optimizer:
    """torch's own Muon on matrices; vectors are frozen."""
    return torch.optim.Muon(
        [(name, p) for name, p in named if p.ndim == 2], lr=0.02, weight_decay=0.1
    )


def muon_by_options(named: Any) -> torch.optim.Optimizer:
    """Groups with rates of their own, as a schedule changes them."""
    named = list(named)
    wrapped = Wrapped(named)
    wrapped.muon.param_groups[0]["lr"] = 0.05
    return wrapped


class Matrices(Net):
    """Vectors are frozen, and one matrix is."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.requires_grad_(p.ndim == 2)
        self.blocks[0].weight.requires_grad_(False)


class Idle(Net):
    """A block that only some samples' windows use."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for number, block in enumerate(self.blocks):
            if number != 1:
                x = x + torch.tanh(block(x))
        return self.out(x) * self.scale


class Tied(Net):
    """The first block's weight is the last one's, too: several stages hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight = self.blocks[0].weight


def job_of(name: str) -> paceline.Job:
    halved = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)  # noqa: E731
    return {
        "wrapped": lambda: optimizer_job(Wrapped),
        "adafactor": lambda: optimizer_job(adafactor),
        "clipped": lambda: optimizer_job(muon_by_options, clip=0.1, lr_schedule=halved),
        "muon": lambda: optimizer_job(muon_alone, Matrices),
        "idle": lambda: optimizer_job(Wrapped, Idle),
        "shampoo": lambda: optimizer_job(Shampoo),
        "lamb": lambda: optimizer_job(Lamb),
        "norm": lambda: optimizer_job(lambda named: GlobalNorm(named, lr=0.1)),
        "idle-norm": lambda: optimizer_job(
            lambda named: GlobalNorm(named, lr=0.1, momentum=0.9, weight_decay=0.1), Idle
        ),
        "tied-norm": lambda: optimizer_job(
            lambda named: GlobalNorm(named, lr=0.1, momentum=0.9), Tied
        ),
        "stacked": lambda: optimizer_job(lambda named: StackedNorm(named, lr=0.1), clip=1.0),
    }[name]()


@cache
def on_one_device(name: str) -> dict[str, Tensor]:
    with TemporaryDirectory() as folder:
        return train(job_of(name), "single", Path(folder) / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("wrapped", "shard=2"),
        ("wrapped", "tensor=2"),
        ("adafactor", "shard=3"),
        ("clipped", "shard=2 zero=1"),
        ("muon", "tensor=2"),
        ("idle", "shard=2"),
        ("shampoo", "data=2 shard=2"),
        ("lamb", "shard=2"),
        ("norm", "shard=2"),
        ("norm", "tensor=2"),
        ("stacked", "data=2 shard=2"),
        ("norm", "data=2"),
        ("norm", "pipeline=2"),
        ("norm", "place=2"),
        ("idle-norm", "pipeline=2"),
        ("tied-norm", "pipeline=2"),
        *(
            pytest.param(name, plan, marks=pytest.mark.slow)
            for name in ("wrapped", "adafactor", "clipped", "muon", "shampoo", "norm")
            for plan in (
                "shard=2 tensor=2",
                "pipeline=2 shard=2",
                "tensor=2 pipeline=2",
                "shard=2 microbatches=2",
                "place=2",
                "data=2 tensor=2",
            )
        ),
    ],
)
def test_the_update_is_that_of_one_device(name: str, plan: str, tmp_path: Path) -> None:
    """Whatever ranks hold, each tensor is updated by what all of it is."""
    assert furthest(train(job_of(name), plan, tmp_path / "run"), on_one_device(name)) < (EXACT, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "legs"),
    [
        ("wrapped", [("shard=2", 3), ("data=2", 7)]),
        *(
            pytest.param(
                name,
                [("shard=2", 1), ("single", 3), ("tensor=2", 5), ("data=2", 7)],
                marks=pytest.mark.slow,
            )
            for name in ("wrapped", "adafactor", "norm")
        ),
    ],
)
def test_it_goes_on_under_other_plans(
    name: str, legs: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Owners write what they hold whole, and whoever needs it reads it: other owners, or ranks with all of it."""
    weights = train_in_legs(job_of(name), legs, tmp_path / "run")

    assert furthest(weights, on_one_device(name)) < (EXACT, "")


@pytest.mark.slow
def test_coupled_parameters_are_refused_where_no_rank_has_all(tmp_path: Path) -> None:
    """Before the first step, with the optimizer, a parameter and plans that work."""
    with pytest.raises(RankFailed) as failed:
        train(job_of("norm"), "servers=2 workers=2", tmp_path / "run")

    assert "GlobalNorm updates 'scale' by other parameters' gradients" in str(failed.value)
    assert "servers=2" in str(
        failed.value
    ) and "hint: use a data=N, shard=N or tensor=N plan" in str(failed.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_tensors_travel_in_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few at a time."""
    monkeypatch.setattr(gather, "ROUND_BYTES", 3000)

    assert furthest(
        train(job_of("wrapped"), "shard=2", tmp_path / "run"), on_one_device("wrapped")
    ) < (EXACT, "")


def test_state_is_held_by_one_rank_of_each(run_ranks: Callable[..., list[Any]]) -> None:
    """Each matrix's state is on one rank alone; what is treated element by element stays in parts."""
    state_by_rank = run_ranks(_held_state, 2)

    assert sorted(state_by_rank[0]["whole"] + state_by_rank[1]["whole"]) == sorted(
        name for name, p in Net().named_parameters() if p.ndim == 2
    )
    assert (
        state_by_rank[0]["parts"]
        == state_by_rank[1]["parts"]
        == sorted(name for name, p in Net().named_parameters() if p.ndim != 2)
    )


def _held_state(context: Any) -> dict[str, list[str]]:
    from paceline.strategies.mesh import Mesh
    from paceline.training.stepper import Stepper

    plan = paceline.Plan.parse("shard=2")
    mesh = Mesh(plan.axes.sizes(), context.rank)
    mesh.connect()
    stepper = Stepper(optimizer_job(Wrapped), plan, mesh, context.device)
    assert stepper.gathered is not None
    updated: dict[str, nn.Parameter] = stepper.optimizer_state.parameters
    return {
        "whole": sorted(stepper.gathered.whole),
        "parts": sorted(updated.keys() - stepper.gathered.whole.keys()),
    }
