"""A GAN whose generator learns a ring of points: two models, two optimizers, an average of weights, no ranks.

    paceline train examples/06_own_step.py --plan data=2
    paceline verify examples/06_own_step.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl

NOISE = 8


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def ring(samples: int) -> TensorDataset:
    angles = torch.rand(samples, generator=torch.Generator().manual_seed(0)) * 2 * torch.pi
    return TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))


def step(ctx: pl.StepContext, batch: Any) -> None:
    real = batch.input
    noise = torch.randn(len(batch), NOISE, dtype=real.dtype)
    fake = ctx.run("generator", noise)
    mix = torch.rand(len(batch), 1, dtype=real.dtype)

    def critic_loss(on_real: Tensor, batch: Any, fake: Tensor, mix: Tensor) -> Tensor:
        between = (mix * batch.input + (1 - mix) * fake).requires_grad_()
        slope, = torch.autograd.grad(ctx.run("critic", between).sum(), between, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        return F.softplus(-on_real).mean() + F.softplus(ctx.run("critic", fake)).mean() + penalty

    ctx.backward("critic", real, critic_loss, fake, mix)
    ctx.update("critic")
    ctx.backward("generator", noise, lambda fake, batch: F.softplus(-ctx.run("critic", fake)).mean())
    ctx.update("generator")


def validate(ctx: pl.StepContext, batch: Any) -> dict[str, Tensor]:
    """How far the average's points are from the ring."""
    noise = batch.input.repeat(1, NOISE // 2)
    points = ctx.run("average", noise)
    off = (points.norm(dim=1) - 1).abs().mean()
    return {"loss": off, "radius": points.norm(dim=1).mean()}


def job(lr: float = 1e-3, steps: int = 200) -> pl.Job:
    def adam(named: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(named, lr=lr, betas=(0.5, 0.99))

    return pl.Job(
        models={"generator": lambda: mlp(NOISE, 2), "critic": lambda: mlp(2, 1)},
        optimizers={"generator": adam, "critic": adam},
        followers={"average": pl.ema("generator", 0.99)},
        step=step,
        data=ring(2000),
        validation=ring(200),
        validate=validate,
        batch=100,
        steps=steps,
    )
