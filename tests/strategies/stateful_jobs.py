"""Jobs whose models keep state or edit themselves, in float64, and how two plans' results compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline


def stateful_job(model: Callable[[], nn.Module], *, samples: int = 36, **changes: Any) -> paceline.Job:
    """A regression from 8 numbers to 4, in batches of 12 and with plain SGD."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 8, generator=generator), torch.randn(samples, 4, generator=generator)
    fields: dict[str, Any] = {
        "model": model, "data": TensorDataset(x, y), "loss": F.mse_loss, "batch": 12, "steps": 6,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1), "precision": "float64"}
    return paceline.Job(**{**fields, **changes})


def trained(job: paceline.Job, plan: str, folder: Path) -> dict[str, Tensor]:
    """The weights and buffers that a run under the plan ends with."""
    run = folder / plan.replace(" ", "-").replace("=", "")
    paceline.train(job, plan, run=run, timeout_s=60)
    return load_file(run / "model.safetensors")


def assert_alike(job: paceline.Job, plan: str, folder: Path, *, reference: str = "single") -> dict[str, Tensor]:
    """Both plans end with the same weights and buffers, to rounding; those of the reference are returned."""
    expected, found = trained(job, reference, folder), trained(job, plan, folder)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: (
            f"{name} under {plan}: {text}"))
    return expected


class Codebook(nn.Module):
    """Vector quantisation with a codebook of moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        quantised = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, 6).to(z)
                self.counts.mul_(0.9).add_(0.1 * chosen.sum(0))
                self.sums.mul_(0.9).add_(0.1 * chosen.t() @ z)
                self.codes.copy_(self.sums / self.counts.clamp(min=0.1)[:, None])
        return self.decode(z + (quantised - z).detach())


class Attributes(nn.Module):
    """State in plain attributes: a counter, a tensor that is replaced, a list, one that is made late."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count, self.history = nn.Linear(8, 8), 0, []
        self.center = torch.zeros(8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) - self.center
        if not hasattr(self, "first"):
            self.first = y.detach().mean(0)
        if self.training:
            self.count += 1
            self.center = self.center * 0.9 + 0.1 * y.detach().mean(0)
            self.history.append(y.detach().mean())
        return torch.tanh(y * min(1.0, self.count / 8) + sum(self.history[-3:]) + self.first)


class MomentumTarget(nn.Module):
    """BYOL's way: a frozen copy follows the trained layer, by a step in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                    q.data.lerp_(p, 0.1)  # no version counter tells of this
        return torch.tanh(self.online(x) + self.target(x))
