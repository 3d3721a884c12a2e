"""The optimizer that the page on optimizers shows: two in one, saved and resumed as if never stopped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl

PAGE = Path(__file__).parents[3] / "docs" / "optimizers.md"


def test_two_optimizers_in_one_go_on_where_they_stopped(tmp_path: Path):
    """Muon and AdamW: 8 steps, then 8 under another plan, are 16 steps on one device, with a schedule for both."""
    names: dict[str, Any] = {"torch": torch}
    (code,) = re.findall(
        r"```python\n(class MuonAndAdamW.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    exec(code, names)
    drawn = torch.Generator().manual_seed(0)
    job = pl.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)),
        loss=F.mse_loss,
        batch=16,
        data=(torch.randn(64, 8, generator=drawn), torch.randn(64, 3, generator=drawn)),
        steps=16,
        precision="float64",
        optimizer=lambda named: names["MuonAndAdamW"](named, 0.02),
        lr_schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 16),
    )
    whole = pl.train(job, "single", run=tmp_path / "whole")["final_loss"]
    pl.train(job, "single", steps=8, run=tmp_path / "parts")
    resumed = pl.train(job, "shard=2", run=tmp_path / "parts", resume=True)["final_loss"]
    assert abs(resumed - whole) < 1e-9
