"""Residual blocks under AdamW on random samples: of 128 numbers, 0.4 million parameters and steps of some 10 ms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

BLOCKS, CLASSES, SAMPLES = 3, 10, 2048


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def net(width: int = 128) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(BLOCKS)), nn.Linear(width, CLASSES))


def samples(width: int = 128) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(SAMPLES, width, generator=generator),
        torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
    )


def job(steps: int = 200, batch: int = 128, lr: float = 1e-3, width: int = 128) -> pl.Job:
    return pl.Job(
        model=lambda: net(width),
        data=samples(width),
        loss=F.cross_entropy,
        batch=batch,
        steps=steps,
        optimizer=lambda named: torch.optim.AdamW(named, lr=lr),
    )
