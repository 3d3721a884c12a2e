"""Tabular regression: the progression of diabetes a year later, from ten measurements of a patient.

paceline train examples/03_diabetes.py --plan data=2 --devices cpu:0-1
"""

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl


def net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


def squared_error(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A loss as (sum, count): Paceline adds up both over all samples of a step and divides once."""
    return (output - target).square().sum(), target.numel()


def job(lr: float = 3e-3, width: int = 32, weight_decay: float = 0.1, epochs: int = 30) -> pl.Job:
    measurements, progression = load_diabetes(return_X_y=True, scaled=False)
    x = torch.tensor(measurements, dtype=torch.float32)
    y = torch.tensor(progression, dtype=torch.float32).unsqueeze(1)
    patients = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = patients[:350], patients[350:]
    unit = y[train].std()
    x = (x - x[train].mean(dim=0)) / x[train].std(dim=0)  # standardised by what training may see
    y = (y - y[train].mean()) / unit
    return pl.Job(
        model=lambda: net(width),
        data=TensorDataset(x[train], y[train]),
        loss=squared_error,
        optimizer=lambda named: torch.optim.AdamW(named, lr=lr, weight_decay=weight_decay),
        batch=60,
        epochs=epochs,
        validation=TensorDataset(x[test], y[test]),
        metrics={
            "mean_absolute_error": lambda output, target: (output - target).abs().mean() * unit
        },
    )
