"""Ranks whose steps take different paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline.launch.process.failure import RankFailed


@pytest.mark.slow
def test_a_condition_on_a_rank_s_own_samples(tmp_path: Path):
    """It holds on one rank alone. The ranks then exchange different tensors, and the run ends at the user's line."""
    inputs = torch.zeros(32, 4)
    inputs[3] = 5.0

    def step(ctx: Any, batch: Any) -> None:
        ctx.backward("a", batch.input, lambda output, given: F.mse_loss(output, given.target))
        if (batch.input > 4).any():
            ctx.backward("b", batch.input, lambda output, given: F.mse_loss(output, given.target))
            ctx.update("b")
        ctx.update("a")

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.1)

    job = pl.Job(
        models={
            "a": lambda: torch.nn.Linear(4, 2),
            "b": lambda: torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Linear(7, 2)),
        },
        optimizers={"a": sgd, "b": sgd},
        training_step=step,
        data=(inputs, torch.ones(32, 2)),
        batch=8,
        epochs=1,
    )
    with pytest.raises(RankFailed, match=r"another place of the step|different tensors") as failed:
        pl.train(job, "data=2", run=tmp_path / "run", check=False)
    assert Path(__file__).name in failed.value.failure.where
    assert "all ranks must take the same path" in str(failed.value)
