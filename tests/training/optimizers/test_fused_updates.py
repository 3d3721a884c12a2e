"""Fused and foreach updates of torch compute under shards what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.training.job_options import load_options


class Net(nn.Module):
    """Blocks, and a parameter without dimensions that stays whole beside shards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(3)]
        )
        self.gain, self.last = nn.Parameter(torch.ones(())), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.gain * x)


UPDATES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda named, **options: torch.optim.AdamW(named, lr=1e-2, **options),
    "Adam": lambda named, **options: torch.optim.Adam(named, lr=1e-2, amsgrad=True, **options),
    "SGD": lambda named, **options: torch.optim.SGD(
        named, lr=0.1, momentum=0.9, nesterov=True, **options
    ),
    "Adagrad": lambda named, **options: torch.optim.Adagrad(named, lr=1e-2, **options),
}


def trained(
    run: Path, name: str, plan: str, *, resume: bool = False, steps: int = 4, **options: Any
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(48, 8, generator=generator), torch.randn(48, 4, generator=generator)
    job = paceline.Job(
        model=Net,
        data=TensorDataset(x, y),
        loss=F.mse_loss,
        batch=12,
        steps=steps,
        clip=0.5,
        precision="float64",
        optimizer=lambda named: UPDATES[name](named, **options),
    )
    paceline.train(job, plan, run=run, resume=resume, timeout_s=60)
    return load_file(run / "model.safetensors")


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", ["shard=2", "data=2 shard=2", "tensor=2", "shard=2 tensor=2", "pipeline=2 shard=2"]
)
@pytest.mark.parametrize("option", ["fused", "foreach"])
@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_one_devices(name: str, option: str, plan: str, tmp_path: Path):
    weights = trained(tmp_path / "plan", name, plan, **{option: True})
    for key, value in trained(tmp_path / "one", name, "single").items():
        torch.testing.assert_close(weights[key], value, rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_a_fused_run_goes_on_on_one_device(tmp_path: Path):
    trained(tmp_path / "run", "AdamW", "shard=2", fused=True, steps=2)
    weights = trained(tmp_path / "run", "AdamW", "single", fused=True, resume=True)
    for key, value in trained(tmp_path / "one", "AdamW", "single").items():
        torch.testing.assert_close(weights[key], value, rtol=1e-11, atol=1e-12)


def test_a_checkpoint_does_not_say_how_updates_are_computed():
    """That depends on the device, which may be another one now."""
    group = {"lr": 0.1, "fused": None, "foreach": True}
    load_options(
        group, {"parameters": ["weight"], "lr": 0.2, "fused": True, "foreach": None}, {}, {}
    )
    assert group == {"lr": 0.2, "fused": None, "foreach": True}
