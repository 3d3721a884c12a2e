"""A `Job` and `paceline.train`, as the README and `docs/running.md` have it. The ranks are forks of this process.

Settings: `scalar` (a loss that is a mean, where `(sum, count)` is asked for), `group_norm`, and the plans `tensor` and
`place`, which do not cut the batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline as pl
from benchmarks.trainers.jobs import BATCH, STOP_AFTER, mean_loss, penalised_loss, total_loss
from benchmarks.trainers.record import Request, read_request, save

PLANS = {"tensor": "tensor=2", "place": "place=2"}


class Penalised(nn.Module):
    """What the step of one's own computes of the model: Paceline's loss gets the outputs alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        input = input.detach().requires_grad_()
        output, shifted = self.model(input), self.model(input + 0.1)
        (slope,) = torch.autograd.grad(output.sum(), input, create_graph=True)
        return output, shifted, slope


def paceline_job(request: Request) -> pl.Job:
    job = request.job
    loss: Callable[[Any, Any], Any] = mean_loss
    if request.name == "custom":
        loss = penalised_loss
    elif request.name == "ignored" and request.setting != "scalar":
        loss = total_loss
    return pl.Job(
        model=(lambda: Penalised(job.model())) if request.name == "custom" else job.model,
        data=job.data,
        loss=loss,
        optimizer=job.optimizer,
        batch=BATCH,
        epochs=job.epochs,
    )


def losses_of(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def main() -> None:
    request = read_request()
    run = request.checkpoint
    pl.train(
        paceline_job(request),
        PLANS.get(request.setting, "data=2"),
        devices="cpu:0,cpu:1",
        run=run,
        steps=STOP_AFTER if request.part == "first" else None,
        resume=request.is_second,
    )
    trained = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(run / "model.safetensors").items()
    }
    losses = losses_of(run)
    save(request, losses[STOP_AFTER:] if request.is_second else losses, trained)


if __name__ == "__main__":
    main()
