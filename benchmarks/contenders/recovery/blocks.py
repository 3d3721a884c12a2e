"""Residual blocks of 128 numbers under AdamW on random samples: 0.4 million parameters, steps of some 10 ms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

WIDTH, BLOCKS, CLASSES, SAMPLES = 128, 3, 10, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def net() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, WIDTH, generator=generator),
                         torch.randint(0, CLASSES, (SAMPLES,), generator=generator))


def job(steps: int = 200, batch: int = 128, lr: float = 1e-3) -> pl.Job:
    return pl.Job(model=net, data=samples(), loss=F.cross_entropy, batch=batch, steps=steps,
                  optimizer=lambda named: torch.optim.AdamW(named, lr=lr))
