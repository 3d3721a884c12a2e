"""A GAN that learns eight clusters of points: two models, two optimizers, an average of weights, no ranks.

paceline train examples/06_own_step.py --plan data=2 --devices cpu:0-1
paceline verify examples/06_own_step.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl

NOISE, POINTS = 2, 1000
SPREAD = 0.05  # standard deviation of a cluster
PENALTY = 0.1
ANGLES = torch.arange(8) * torch.pi / 4
CENTRES = torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)  # (clusters, 2), on a circle of radius 1
TRIED = torch.randn(
    POINTS, NOISE, generator=torch.Generator().manual_seed(2)
)  # the same in each evaluation


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, outputs),
    )


def clusters(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    centres = CENTRES[torch.randint(len(CENTRES), (samples,), generator=generator)]
    return TensorDataset(centres + SPREAD * torch.randn(samples, 2, generator=generator))


def step(ctx: pl.StepContext, batch: Any) -> None:
    real = batch.input
    noise = torch.randn(len(batch), NOISE)
    fake = ctx.run("generator", noise)

    def critic_loss(on_real: Tensor, batch: Any, fake: Tensor) -> Tensor:
        """With a penalty on slopes at real points (R1; Mescheder et al. 2018), which lets both models settle."""
        point = batch.input.clone().requires_grad_()
        (slope,) = torch.autograd.grad(ctx.run("critic", point).sum(), point, create_graph=True)
        penalty = PENALTY / 2 * slope.square().sum(1).mean()
        return F.softplus(-on_real).mean() + F.softplus(ctx.run("critic", fake)).mean() + penalty

    ctx.backward("critic", real, critic_loss, fake)
    ctx.update("critic")
    ctx.backward(
        "generator", noise, lambda fake, batch: F.softplus(-ctx.run("critic", fake)).mean()
    )
    ctx.update("generator")


def validate(ctx: pl.StepContext, batch: Any) -> dict[str, Tensor]:
    """The energy distance between the average's points and real ones (0 if they are alike; Székely & Rizzo 2013), in
    how many clusters at least 2 % of its points lie, and which part of them lies in any."""
    real = batch.input
    points = ctx.run("average", TRIED.to(real), cut=False)
    others = clusters(POINTS, seed=3).tensors[0].to(real)
    distance = (
        2 * torch.cdist(real, points).mean()
        - torch.cdist(real, others).mean()
        - torch.cdist(points, points).mean()
    )
    nearest, cluster = torch.cdist(points, CENTRES.to(real)).min(1)
    is_inside = nearest < 4 * SPREAD
    counts = torch.bincount(cluster[is_inside], minlength=len(CENTRES))
    return {
        "loss": distance,
        "clusters": (counts >= 0.02 * POINTS).sum().to(real),
        "inside": is_inside.to(real).mean(),
    }


def job(lr: float = 2e-3, steps: int = 800) -> pl.Job:
    def adam(named: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(named, lr=lr, betas=(0.0, 0.99))

    return pl.Job(
        models={"generator": lambda: mlp(NOISE, 2), "critic": lambda: mlp(2, 1)},
        optimizers={"generator": adam, "critic": adam},
        followers={"average": pl.ema("generator", 0.99)},
        training_step=step,
        data=clusters(25600, seed=0),
        validation=clusters(POINTS, seed=1),
        validation_step=validate,
        batch=256,
        steps=steps,
    )
