"""What is wrong with a job ends its run before the first step, and without a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.launch.process.failure import RankFailed

X, Y = torch.arange(80.0).reshape(20, 4) / 80, torch.arange(20) % 3


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def job(**fields: Any) -> pl.Job:
    return pl.Job(
        **{
            "model": net,
            "data": (X, Y),
            "loss": F.cross_entropy,
            "optimizer": sgd,
            "batch": 4,
            "steps": 2,
            **fields,
        }
    )


def several(**fields: Any) -> pl.Job:
    def step(ctx: Any, batch: Any) -> None:
        def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
            return (ctx.run("critic", output) ** 2).mean()

        ctx.backward("net", batch.input, loss)
        ctx.update("net")

    return pl.Job(
        **{
            "models": {"net": net, "critic": lambda: nn.Linear(3, 1)},
            "data": X,
            "batch": 4,
            "steps": 2,
            "optimizers": {"net": sgd, "critic": sgd},
            "training_step": step,
            **fields,
        }
    )


@pytest.mark.sweep(3)
@pytest.mark.checked_runs
@pytest.mark.parametrize(
    ("made", "plan", "message"),
    [
        (lambda: job(freeze="0.wieght"), "data=2", "freeze='0.wieght' matches no parameter"),
        (
            lambda: job(init="none.safetensors"),
            "data=2",
            "there is no file or folder 'none.safetensors'",
        ),
        (lambda: job(lr_schedule=plateau), "single", "there is no validation data"),
        (
            lambda: several(init={"net": {"head": X}}),
            "data=2",
            "'net': init: it has nothing for 4",
        ),
        (several, "tensor=2", "a loss runs 'critic', and under 'tensor=2'"),
        (job, "pipeline=3", "the model has 2 pieces"),
        (job, "place=3", "the model has 2 pieces"),
    ],
)
def test_what_ranks_refuse_when_they_start_leaves_no_folder(
    made: Any, plan: str, message: str, tmp_path: Path
):
    with pytest.raises(RankFailed, match=message):
        pl.train(made(), plan, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_data_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    for batch, is_said in ((21, True), (20, False)):
        pl.train(job(batch=batch, steps=1), "single", run=tmp_path / str(batch))
        assert ("a batch of 21 is more than the 20 samples" in capfd.readouterr().err) == is_said
