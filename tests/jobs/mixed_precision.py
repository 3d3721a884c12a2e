"""Jobs of any precision, and one device's loop as one writes it by hand, with torch's own GradScaler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import paceline
from paceline.base.streams import seed_model
from paceline.proof.order import whole_batches


class Blocks(nn.Module):
    """Layers with sides that are multiples of 16, but for the head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def data(*, largest: float = 1.0, samples: int = 48) -> TensorDataset:
    """largest: of the inputs, about; beyond 1, gradients times 2**16 don't fit float16."""
    draws = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(samples, 32, generator=draws) * largest,
        torch.randint(3, (samples,), generator=draws),
    )


def token_sum(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts every other class twice."""
    weight = 1.0 + (target % 2)
    return (F.cross_entropy(output, target, reduction="none") * weight).sum(), weight.sum()


def mixed_precision_job(**changes: Any) -> paceline.Job:
    fields: dict[str, Any] = {
        "model": Blocks,
        "data": data(),
        "loss": F.cross_entropy,
        "batch": 12,
        "steps": 6,
        "precision": "fp16",
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2),
        "lr_schedule": lambda optimizer: StepLR(optimizer, 2, 0.5),
    }
    return paceline.Job(**{**fields, **changes})


@dataclass
class ByHand:
    """losses, scales, skipped: of each step."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    rate: float = 0.0


def by_hand(
    job: paceline.Job,
    *,
    accumulate: int = 1,
    before_step: Callable[[int], None] = lambda step: None,
) -> ByHand:
    """The loop of torch's documentation on one CPU, for losses that are means."""
    seed_model(job.seed)
    model, result = job.model(), ByHand()
    optimizer = job.optimizer(list(model.named_parameters()))
    schedule = job.lr_schedule(optimizer) if job.lr_schedule else None
    scaler = torch.amp.GradScaler("cpu", enabled=job.precision == "fp16")
    for step, batch in enumerate(whole_batches(job, job.steps)):
        before_step(step)
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(batch.input.chunk(accumulate), batch.target.chunk(accumulate), strict=True):
            with torch.autocast("cpu", torch.float16, enabled=job.precision == "fp16"):
                loss = job.loss(model(x), y) / accumulate
            scaler.scale(loss).backward()
            total += loss.item()
        scale = scaler.get_scale()
        scaler.unscale_(optimizer)
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        scaler.step(optimizer)
        scaler.update()
        is_skipped = scaler.get_scale() < scale
        if schedule is not None and not is_skipped:
            schedule.step()
        result.losses.append(total)
        result.scales.append(scale)
        result.skipped.append(is_skipped)
    result.weights = {name: p.detach() for name, p in model.named_parameters()}
    result.rate = optimizer.param_groups[0]["lr"]
    return result
