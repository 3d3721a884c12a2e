"""Small odd but legitimate models, and a comparison of what a plan trains with what one device trains."""

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
from paceline.launch.failure import RankFailed

BATCH, SAMPLES = 12, 50
SPLITS = ("tensor=2", "pipeline=2 microbatches=1", "place=auto parts=2")


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.l = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.l(x))


class Net(nn.Module):
    """A layer, three blocks in a list, a layer."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.ModuleList(block() for _ in range(3))
        self.o = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for block in self.b:
            x = block(x)
        return self.o(x)


def job_of(model: Callable[[], nn.Module], **changes: Any) -> paceline.Job:
    """A regression in float64 with plain SGD."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 8, generator=generator)
    y = torch.randn(SAMPLES, 4, generator=generator)
    fields = {"model": model, "data": TensorDataset(x, y), "loss": F.mse_loss, "batch": BATCH, "steps": 4,
              "precision": "float64", "optimizer": lambda named: torch.optim.SGD(named, lr=0.1), "drop_last": True}
    return paceline.Job(**{**fields, **changes})


def trained(job: paceline.Job, plan: str, folder: Path, **options: Any) -> dict[str, Tensor]:
    """Everything in the model that a plan trains, by name."""
    world_size = paceline.Plan.parse(plan).world_size
    paceline.train(job, plan, devices=f"cpu:0-{world_size - 1}" if world_size > 1 else "cpu:0", run=folder,
                   timeout_s=60, **options)
    return load_file(folder / "model.safetensors")


def difference(job: Callable[[], paceline.Job], plan: str, folder: Path, *, single: str = "single") -> float:
    """The greatest of any parameter and buffer between a plan and one device."""
    expected = trained(job(), single, folder / "single")
    found = trained(job(), plan, folder / "plan")
    assert found.keys() == expected.keys()
    return max(float((found[name].double() - tensor.double()).abs().max()) for name, tensor in expected.items())


def refusal(job: paceline.Job, plan: str, folder: Path) -> str:
    """What is said of a plan that is refused before the first step."""
    try:
        trained(job, plan, folder)
    except RankFailed as failed:
        assert failed.failure.kind == "PlanRefused", failed
        assert failed.failure.step == 0, failed
        return str(failed)
    raise AssertionError(f"{plan} was not refused")
