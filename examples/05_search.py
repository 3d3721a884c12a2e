"""A search over a small net on handwritten digits: its size, how it is trained, and a choice inside the model.

paceline search examples/05_search.py --trials 60
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import paceline as pl

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}

# Loaded once for all trials, as it stands outside of the function.
pixels, digits = load_digits(return_X_y=True)
images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
train_set, validation_set, test_set = random_split(
    TensorDataset(images, torch.tensor(digits)),
    [0.6, 0.2, 0.2],
    generator=torch.Generator().manual_seed(0),
)


def net(width: int, depth: int, activation: str) -> nn.Module:
    """Some 3x3 convolutions on 8x8 pixels, pooled once, and a linear layer."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Conv2d(width if index else 1, width, 3, padding=1), ACTIVATIONS[activation]()]
    pool = {"max": nn.MaxPool2d, "mean": nn.AvgPool2d}[pl.choice("net.pool", ["max", "mean"])](2)
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(16 * width, 10))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def job(
    lr: Annotated[float, pl.Log(1e-4, 1e-1)] = 1e-3,
    width: Annotated[int, pl.Range(8, 32, step=8)] = 16,
    depth: Annotated[int, pl.Range(1, 3)] = 2,
    activation: Literal["relu", "gelu", "tanh"] = "relu",
    batch: Literal[16, 32, 64, 128] = 32,
    epochs: int = 10,
) -> pl.Job:
    return pl.Job(
        model=lambda: net(width, depth, activation),
        data=train_set,
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=lr),
        batch=batch,
        epochs=epochs,
        validation=validation_set,
        test=test_set,
        metrics={"accuracy": accuracy},
    )
