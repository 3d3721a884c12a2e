"""Replicas that take steps of the job's own by themselves come out as a loop written by hand says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.job.named_models import NamedModels
from paceline.job.order import split
from paceline.proof.order import whole_batches
from tests.corpus.own_steps import fields, small


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def step(ctx: paceline.StepContext, batch: Any) -> None:
    """Two models, of which one learns in two updates, and an average that a loss looks at."""
    soft = ctx.run("average", batch)
    ctx.backward(
        "body",
        batch,
        lambda out, batch, soft: F.mse_loss(out, batch.target) + F.mse_loss(out, soft),
        soft,
    )
    ctx.update("body")
    y = ctx.run("body", batch)
    ctx.backward(
        "head", y, lambda out, batch: (F.mse_loss(out, batch.target, reduction="sum"), out.numel())
    )
    ctx.update("head")


def job(**changes: Any) -> paceline.Job:
    return paceline.Job(
        models={"body": small(), "head": small(3)},
        optimizers={"body": sgd, "head": sgd},
        training_step=step,
        followers={"average": paceline.ema("body", 0.9)},
        **fields(**{"steps": 6, **changes}),
    )


def by_hand(job: paceline.Job, replicas: int, local: int) -> dict[str, torch.Tensor]:
    """Each replica has all models; every so many steps their weights become the mean by samples."""
    models = NamedModels.of(job.models, job.followers, job.seed).double()
    mine = [copy.deepcopy(models) for _ in range(replicas)]
    optimizers = [
        {name: sgd(m.get_submodule(name).named_parameters()) for name in job.models} for m in mine
    ]
    counts = [0.0] * replicas
    for number, batch in enumerate(whole_batches(job, job.total_steps or 0), 1):
        parts = split(len(batch.input), [1] * replicas)
        for k, part in enumerate(parts):
            x, y = batch.input[part.start : part.stop], batch.target[part.start : part.stop]
            counts[k] += len(x)
            body, head, average = (
                mine[k].get_submodule(name) for name in ("body", "head", "average")
            )
            out = body(x)
            _update(
                optimizers[k]["body"], F.mse_loss(out, y) + F.mse_loss(out, average(x).detach())
            )
            _update(optimizers[k]["head"], F.mse_loss(head(body(x).detach()), y))
            with torch.no_grad():
                for a, p in zip(average.parameters(), body.parameters(), strict=True):
                    a.mul_(0.9).add_(p, alpha=0.1)
        if number % local == 0 or number == job.total_steps:
            _meet(mine, counts)
            counts = [0.0] * replicas
    return {name: p.detach() for name, p in mine[0].named_parameters()}


def _update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def _meet(models: list[nn.Module], counts: list[float]) -> None:
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = sum(
            (p * count / sum(counts) for p, count in zip(same, counts, strict=True)),
            torch.zeros_like(same[0]),
        )
        for p in same:
            p.copy_(mean)


@pytest.mark.parametrize("local", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_all_models_and_followers_meet(tmp_path: Path, local: int) -> None:
    """The third and sixth window are short, and the run ends with a part of a round."""
    expected = by_hand(job(), 2, local)

    paceline.train(job(), f"data=2 local={local}", run=tmp_path / "run", steps=6)

    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(
        torch.allclose(weights[name], expected[name], rtol=0, atol=1e-12) for name in expected
    )


def test_the_loss_is_that_of_all_samples(tmp_path: Path) -> None:
    """Also of a short last window, of which one replica has no sample: weights stay as they are, so that each window
    has the loss of one device."""

    def one_backward(ctx: paceline.StepContext, batch: Any) -> None:
        ctx.backward("net", batch, lambda out, batch: F.mse_loss(out, batch.target))
        ctx.update("net")

    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    still = paceline.Job(
        models={"net": lambda: nn.Linear(3, 1)},
        optimizers={"net": lambda named: torch.optim.SGD(named, lr=0.0)},
        training_step=one_backward,
        data=(x, x.sum(1, keepdim=True)),
        batch=4,
        epochs=1,
        precision="float64",
    )
    losses = []
    for plan in ("single", "data=2 local=2"):
        paceline.train(still, plan, run=tmp_path / plan, check=False)
        lines = map(json.loads, (tmp_path / plan / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
