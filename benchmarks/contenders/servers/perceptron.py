"""The work as a job: `paceline train benchmarks/contenders/servers/perceptron.py --plan "servers=1 workers=2"`."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline as pl
from benchmarks.contenders.servers.work import BATCH, LR, WIDTHS, data, initial_weights


def model() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    net = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for layer, (weight, bias) in zip(net[::2], initial_weights(), strict=True):
            layer.weight.copy_(torch.from_numpy(weight).T)
            layer.bias.copy_(torch.from_numpy(bias))
    return net


def job(batch: int = BATCH, steps: int = 100, lr: float = LR) -> pl.Job:
    x, target = data()
    return pl.Job(
        model=model,
        data=TensorDataset(torch.from_numpy(x), torch.from_numpy(target)),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=lr),
        batch=batch,
        steps=steps,
    )
