"""What is wrong with a job is said before the run has a folder or a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.api.preflight import refuse_early
from paceline.base.errors import JobError, PacelineError, PlanError, PlanRefused
from paceline.strategies.plan import Plan

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


@pytest.mark.parametrize(
    ("made", "plan", "kind", "message"),
    [
        (
            lambda: job(freeze="0.wieght"),
            "data=2",
            JobError,
            "freeze='0.wieght' matches no parameter",
        ),
        (
            lambda: job(init="none.safetensors"),
            "data=2",
            JobError,
            "there is no file or folder 'none.safetensors'",
        ),
        (
            lambda: job(init={"head": X}),
            "data=2",
            JobError,
            "it has nothing for 4 of the model's weights: 0.weight",
        ),
        (
            lambda: job(init={**net().state_dict(), "0.bias": X}),
            "data=2",
            JobError,
            r"'0.bias' has shape \(20, 4\) there",
        ),
        (lambda: job(lr_schedule=plateau), "single", JobError, "there is no validation data"),
        (
            lambda: job(validation=(X, Y), lr_schedule=pl.monitored("acc", plateau)),
            "single",
            JobError,
            "monitors 'acc'",
        ),
        (lambda: several(freeze="net.0.wieght"), "data=2", JobError, "matches no parameter"),
        (
            lambda: several(init={"net": {"head": X}}),
            "data=2",
            JobError,
            "'net': init: it has nothing for 4",
        ),
        (
            lambda: several(
                optimizers={"net": pl.Optimizer(sgd, lr_schedule=plateau), "critic": sgd}
            ),
            "data=2",
            JobError,
            "there is no validation data",
        ),
        (several, "tensor=2", PlanRefused, "a loss runs 'critic', and under 'tensor=2'"),
    ],
)
def test_what_no_rank_need_find(made: Any, plan: str, kind: type[PacelineError], message: str):
    with pytest.raises(kind, match=message):
        refuse_early(made(), Plan.parse(plan))


def fails(*given: Any) -> Any:
    raise ValueError("the job's own")


@pytest.mark.parametrize(
    "made",
    [
        lambda: job(
            freeze="0.weight", init=net().state_dict(), validation=(X, Y), lr_schedule=plateau
        ),
        job,
        several,
        lambda: job(freeze="0.wieght", model=fails),
        lambda: job(lr_schedule=fails),
        lambda: job(init=fails),
        lambda: several(training_step=fails),
        lambda: job(init=pl.pretrained({"0.bias": X[0, :1].repeat(8)}, strict=False)),
    ],
)
def test_what_is_left_to_the_ranks(made: Any):
    """Sound jobs, and errors of the job's own code, which a rank shows with its lines."""
    refuse_early(made(), Plan.parse("data=2"))


def test_a_simple_job_is_not_looked_at():
    """It starts as fast as ever."""
    assert not refuse_early(job(), Plan.parse("data=2"))


def test_no_folder_is_made(tmp_path: Path):
    with pytest.raises(JobError, match="matches no parameter"):
        pl.train(job(freeze="0.wieght"), "data=2", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.sweep(2)
@pytest.mark.checked_runs
@pytest.mark.parametrize(
    "plan", ["pipeline=3", "place=3", "pipeline=2 schedule=interleaved virtual=2"]
)
def test_more_stages_than_pieces_are_refused_before_a_rank_starts(plan: str, tmp_path: Path):
    with pytest.raises(PlanError, match="the model has 2 pieces"):
        pl.train(job(), plan, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_data_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    for batch, is_said in ((21, True), (20, False)):
        pl.train(job(batch=batch, steps=1), "single", run=tmp_path / str(batch))
        assert ("a batch of 21 is more than the 20 samples" in capfd.readouterr().err) == is_said
