"""A net whose weights, gradients and AdamW state are too large for one process: each of four ranks holds a quarter.

paceline train examples/09_too_large.py --plan single --devices cpu:0 --memory 192MiB    # refused
paceline train examples/09_too_large.py --plan pipeline=4 --devices cpu:0-3 --memory 192MiB
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import paceline as pl


class Block(nn.Module):
    """A residual layer; 4 MiB of weights if it is 1024 wide."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


def net(width: int, layers: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), *(Block(width) for _ in range(layers)), nn.Linear(width, 10)
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def job(width: int = 1024, layers: int = 24, steps: int = 40) -> pl.Job:
    pixels, digits = load_digits(return_X_y=True)
    samples = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits))
    train_set, test_set = random_split(
        samples, [0.8, 0.2], generator=torch.Generator().manual_seed(0)
    )
    return pl.Job(
        model=lambda: net(width, layers),
        data=train_set,
        validation=test_set,
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
        batch=32,
        steps=steps,
        metrics={"accuracy": accuracy},
    )
