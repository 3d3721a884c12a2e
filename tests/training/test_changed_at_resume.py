"""A resumed job that says something else than the one that was saved: applied or refused, and always said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import SequentialSampler, TensorDataset

import paceline

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sgd(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda named: torch.optim.SGD([p for _, p in named], **{"lr": 0.1, **options})


def make_job(**changes: Any) -> paceline.Job:
    return paceline.Job(
        **{
            "model": lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)),
            "data": TensorDataset(X, X[:, :3].sin()),
            "loss": F.mse_loss,
            "optimizer": sgd(),
            "batch": 8,
            "steps": 8,
            "precision": "float64",
            **changes,
        }
    )


def train(
    job: paceline.Job, run: Path, plan: str = "single", **options: Any
) -> list[dict[str, Any]]:
    """The steps' lines."""
    paceline.train(
        job, plan, devices=f"cpu:0-{paceline.Plan.parse(plan).world_size - 1}", run=run, **options
    )
    return [
        line
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "loss" in line
    ]


def step_lr(size: int) -> Callable[[Any], Any]:
    return lambda optimizer: lr_scheduler.StepLR(optimizer, size, gamma=0.5)


SEQUENTIAL = {
    "lr_schedule": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    )
}
SCHEDULED = {
    "lr_schedule": step_lr(3)
}  # a line of a step has the rate of the next one: 0.05 after the third


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("before", "after", "words", "rates"),
    [
        (
            {},
            {"optimizer": sgd(lr=0.01, momentum=0.5)},
            ["lr is 0.01, and was 0.1", "momentum is 0.5, and was 0"],
            [0.01] * 4,
        ),
        (
            SCHEDULED,
            {**SCHEDULED, "optimizer": sgd(lr=0.2)},
            ["lr is 0.2, and was 0.1"],
            [0.1, 0.05, 0.05, 0.05],
        ),
        (
            SCHEDULED,
            {"lr_schedule": step_lr(5)},
            ["the schedule's step_size is 5, and was 3"],
            [0.025] * 4,
        ),
        (
            {},
            SCHEDULED,
            ["the schedule is StepLR, and was none: it begins at step 4"],
            [0.1, 0.1, 0.05, 0.05],
        ),
        (SCHEDULED, {}, ["the schedule is none, and was StepLR"], [0.1] * 4),
        (
            SCHEDULED,
            SEQUENTIAL,
            ["the schedule is SequentialLR(ConstantLR, ExponentialLR), and was StepLR"],
            [0.05, 0.1, 0.1, 0.09],
        ),
        (
            {},
            {"loss": F.l1_loss, "clip": 1.0, "drop_last": True, "sampler": SequentialSampler(X)},
            [
                "loss is l1_loss, and was mse_loss",
                "clip is 1.0, and was None",
                "drop_last is True",
                "sampler is Sequential",
            ],
            [0.1] * 4,
        ),
        (
            {"sample_weights": [1.0] * 20},
            {"sample_weights": [1.0] * 10 + [9.0] * 10},
            ["sampler is WeightedRandomSampler (draws "],
            [0.1] * 4,
        ),
        (SCHEDULED, SCHEDULED, ["resumed from step-4\n"], [0.05, 0.025, 0.025, 0.025]),
    ],
    ids=[
        "options",
        "scheduled-rate",
        "step-size",
        "new",
        "gone",
        "other-kind",
        "settings",
        "weights",
        "nothing",
    ],
)
def test_what_a_resumed_job_says_otherwise_is_applied_and_said(
    before: dict[str, Any],
    after: dict[str, Any],
    words: list[str],
    rates: list[float],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    train(make_job(**before), tmp_path, steps=4)
    lines = train(make_job(**after), tmp_path, resume=True)
    said = capfd.readouterr().err

    assert [word for word in words if word not in said] == []
    assert [line["lr"] for line in lines[4:]] == pytest.approx(rates)


def test_servers_say_it_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = "servers=1 workers=1"
    train(make_job(), tmp_path, plan, steps=2)
    lines = train(make_job(optimizer=sgd(lr=0.01)), tmp_path, plan, resume=True, steps=4)

    assert "lr is 0.01, and was 0.1" in capfd.readouterr().err and lines[-1]["lr"] == 0.01


def grouped(names: list[str], is_turned: bool) -> Callable[[Any], torch.optim.Optimizer]:
    """Two groups, made of names in the order of a set."""

    def build(named: Any) -> torch.optim.Optimizer:
        by_name = dict(named)
        groups = [
            {
                "params": [by_name[name] for name in names if "weight" in name],
                "weight_decay": 0.3,
                "lr": 0.02,
            },
            {"params": [by_name[name] for name in names if "bias" in name]},
        ]
        return torch.optim.AdamW(groups[::-1] if is_turned else groups, lr=0.05)

    return build


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["single", "shard=2"])
def test_groups_that_are_made_of_sets_are_found_again(plan: str, tmp_path: Path) -> None:
    """In whatever order they, and the parameters in them, come; and so is each one's schedule."""
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    schedule = {"lr_schedule": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9)}
    first, turned = (
        make_job(optimizer=grouped(names[::step], step < 0), **schedule) for step in (1, -1)
    )
    train(first, tmp_path / "whole", plan)
    train(first, tmp_path / "cut", plan, steps=3)
    train(turned, tmp_path / "cut", plan, resume=True, steps=5)
    train(first, tmp_path / "cut", plan, resume=True)

    expected = load_file(tmp_path / "whole" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "cut" / "model.safetensors").items():
        assert torch.equal(tensor, expected[name]), name
