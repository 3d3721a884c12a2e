"""Handwritten digits and a small convolutional net: a complete job.

paceline train examples/01_digits.py                                    # the fastest plan for the devices here
paceline train examples/01_digits.py --plan data=2 --devices cpu:0-1    # two ranks, without --devices a GPU each
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import paceline as pl


def net(width: int) -> nn.Module:
    """Two convolutions on 8x8 pixels, then two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 4 * 4, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, 10),
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def job(lr: float = 1e-3, width: int = 32, epochs: int = 20) -> pl.Job:
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    samples = TensorDataset(images, torch.tensor(digits))
    train_set, test_set = random_split(
        samples, [0.8, 0.2], generator=torch.Generator().manual_seed(0)
    )
    return pl.Job(
        model=lambda: net(width),
        data=train_set,
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=lr),
        batch=60,
        epochs=epochs,
        validation=test_set,
        metrics={"accuracy": accuracy},
    )
