"""A signal to one rank of a run with servers stops all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.base.errors import Preempted
from paceline.checkpoint import newest_checkpoint
from paceline.launch.process.failure import RankFailed
from paceline.launch.process.faults import Fault, FaultInjector
from paceline.strategies.compose import load
from paceline.strategies.plan import Plan
from paceline.training.drivers import fault_policy, train_rank
from paceline.training.settings import Settings


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rank", [1, 2])
def test_a_signal_to_a_second_server_or_a_worker(
    run_ranks: Callable[..., Any], tmp_path: Path, rank: int
):
    """Rank 0 hears of it, saves a checkpoint and names the rank; without it, the run would take its 100,000 steps."""
    plan = Plan.parse("servers=2 workers=1")
    job = pl.Job(
        model=lambda: nn.Linear(4, 2),
        data=[(torch.ones(4), torch.ones(2))] * 8,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=4,
        steps=100_000,
    )

    def body(context: Any) -> None:
        context.faults = FaultInjector(
            [Fault.parse("preempt", f"{rank}@3")],
            rank=context.rank,
            run_dir=tmp_path,
            launcher_pid=0,
        )
        with context.stoppable():
            train_rank(context, job, plan, Settings(tmp_path, (1,)))

    load(plan)
    with pytest.raises(
        RankFailed, match=rf"stopped by a signal to rank {rank} after step \d+; a ch"
    ) as stopped:
        run_ranks(body, 3, fault_policy=fault_policy(plan))
    assert stopped.value.exit_code == Preempted.exit_code
    assert newest_checkpoint(tmp_path, accept=lambda saved: None, warn=print) is not None
