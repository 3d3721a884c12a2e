"""A perceptron over tensors in memory, whose steps take a few milliseconds."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

FEATURES, CLASSES, SAMPLES = 64, 10, 2**15


def job(width: int = 256, batch: int = 64) -> pl.Job:
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randn(SAMPLES, FEATURES, generator=draw)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=draw)

    def net() -> nn.Module:
        hidden = (layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU()))
        return nn.Sequential(
            nn.Linear(FEATURES, width), nn.ReLU(), *hidden, nn.Linear(width, CLASSES)
        )

    return pl.Job(
        model=net,
        data=TensorDataset(pixels, labels),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        batch=batch,
        epochs=100,
    )
