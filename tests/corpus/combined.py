"""Jobs of several ideas at once, for the power to tell a wrong plan from a right one in few steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

from .data import Noisy
from .experts import Idle, Routed
from .registry import BATCH, FEATURES, Block, Net, entry, integers, make_job, numbers
from .sharing import Tied, token_loss

SAMPLES = 2 * BATCH + 2  # the third window has two samples, the fourth begins another epoch


def _adamw(named: Any) -> torch.optim.Optimizer:
    pairs = list(named)
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in pairs if p.ndim > 1], "weight_decay": 0.2},
            {"params": [p for _, p in pairs if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=2e-2,
        eps=1e-3,
    )


def _momentum(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def _warm_up(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (0.3, 1.0, 0.6, 0.8, 0.2)[step % 5]
    )


class Gated(nn.Module):
    """A residual block that also makes a gate of the model's input, which no gradient comes back for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.linear(x)), torch.sigmoid(self.gate(given))


class Skipping(nn.Module):
    """Residual blocks whose first output every later block and the head read, a gate that a middle block makes for the
    head, a scalar weight, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(FEATURES, FEATURES), nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(
            [Block(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.3))) for _ in range(4)]
        )
        self.gated = Gated()
        self.last = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        given, skip = x, torch.tanh(self.first(x))
        x = skip
        for block in self.blocks[:2]:
            x = block(x + skip)
        x, gate = self.gated(x, given)
        for block in self.blocks[2:]:
            x = block(x + skip)
        return self.last((x + skip) * gate) * self.scale


def _regression(samples: int) -> TensorDataset:
    x = numbers(samples, FEATURES)
    return TensorDataset(x, torch.tanh(x @ numbers(FEATURES, 3, seed=3)))


@entry(
    "skips, dropout, clipping, a schedule, groups, a short window, validation", random_layers=True
)
def combined_regression() -> paceline.Job:
    return make_job(
        Skipping,
        data=_regression(SAMPLES),
        optimizer=_adamw,
        lr_schedule=_warm_up,
        clip=0.4,
        validation=_regression(17),
    )


def _tokens(samples: int) -> TensorDataset:
    x = integers(20, samples, 6)
    target = x[:, 1:].clone()
    target[
        torch.arange(samples) % 3 == 0, 1:
    ] = -100  # a third of the samples counts one token of five
    return TensorDataset(x[:, :-1].contiguous(), target)


@entry(
    "a tied embedding, tokens unevenly ignored, momentum, a schedule, a short window, validation"
)
def combined_tokens() -> paceline.Job:
    return make_job(
        Tied,
        data=_tokens(SAMPLES),
        loss=token_loss,
        optimizer=_momentum,
        lr_schedule=_warm_up,
        clip=2.0,
        validation=_tokens(13),
    )


class Normed(nn.Module):
    """Batch norms and a count of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(
            lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES))
        )
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        return self.net(x)


@entry("batch norms with momentum and validation")
def combined_norms() -> paceline.Job:
    return make_job(
        Normed, data=_regression(4 * BATCH), optimizer=_momentum, validation=_regression(17)
    )


class Watched(nn.Module):
    """A net with dropout beside running statistics of its inputs, which it never uses, each an own rate."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Skipping()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("greatest", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
                self.greatest.copy_(torch.maximum(self.greatest, (x.abs().max() * 100).long()))
        return self.net(x)


@entry("running statistics beside a net with dropout: coupled buffers", random_layers=True)
def combined_statistics() -> paceline.Job:
    return make_job(
        Watched, data=_regression(SAMPLES), optimizer=_adamw, validation=_regression(17)
    )


class Experts(nn.Module):
    """A block whose experts are called by samples, and one of which an expert is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.routed, self.idle = (
            nn.Linear(FEATURES, FEATURES),
            Block(Routed()),
            Block(Idle()),
        )
        self.last = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.idle(self.routed(self.first(x))))


@entry("routed experts and an idle one, with decay and noise in the data")
def combined_experts() -> paceline.Job:
    return make_job(Experts, data=Noisy(), optimizer=_adamw)
