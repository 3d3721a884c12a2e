"""A perceptron under AdamW: 84 million parameters by default, whose checkpoint has 1.0 GB."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

SAMPLES = 1024


def net(width: int, layers: int) -> nn.Module:
    return nn.Sequential(
        *(module for _ in range(layers) for module in (nn.Linear(width, width), nn.Tanh()))
    )


def job(width: int = 4096, layers: int = 5, steps: int = 60, batch: int = 256) -> pl.Job:
    samples = torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(0))
    return pl.Job(
        model=lambda: net(width, layers),
        data=TensorDataset(samples, samples),
        loss=nn.functional.mse_loss,
        batch=batch,
        steps=steps,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
    )
