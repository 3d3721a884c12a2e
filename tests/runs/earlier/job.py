"""The job of the run folders here, which the program of 28 November 2026 wrote; see `test_earlier_runs.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl

STEPS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x)


def data() -> TensorDataset:
    x = torch.linspace(-1, 1, 24 * 4, dtype=torch.float64).reshape(24, 4)
    return TensorDataset(x, x[:, :2].sin())


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


def step(ctx: Any, batch: Any) -> None:
    ctx.backward("net", batch.input, lambda output, batch: F.mse_loss(output, batch.target))
    ctx.update("net")


def job(own_step: bool = False) -> pl.Job:
    """A usual job, or one whose step is its own."""
    common: dict[str, Any] = {"data": data(), "batch": 12, "steps": STEPS, "precision": "float64"}
    if own_step:
        return pl.Job(
            models={"net": Net},
            step=step,
            optimizers={"net": pl.Optimizer(adamw, lr_schedule=schedule)},
            **common,
        )
    return pl.Job(
        model=Net,
        loss=F.mse_loss,
        optimizer=adamw,
        lr_schedule=schedule,
        clip=1.0,
        validation=data(),
        **common,
    )
