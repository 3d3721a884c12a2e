"""Samples that are drawn once and the same everywhere."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset


def three_classes(samples: int, *, features: int = 6) -> TensorDataset:
    """Normal features of shape (features,), and a class for the signs of the first two."""
    x = torch.randn(samples, features, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def regression(samples: int, *, inputs: int = 8, outputs: int = 4, seed: int = 1) -> TensorDataset:
    """Normal inputs of shape (inputs,) and normal targets of shape (outputs,) that don't depend on them."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, generator=drawn)
    return TensorDataset(x, torch.randn(samples, outputs, generator=drawn))
