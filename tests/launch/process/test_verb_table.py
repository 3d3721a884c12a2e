"""Ranks that call different verbs of a step are named with both verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline.launch.process.failure import RankFailed
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.launch.process.verb_table import VerbTable


def test_the_first_verb_that_differs_is_named():
    table = VerbTable(3)
    for rank, verbs in enumerate(
        (["run a", "update a"], ["run a", "update a"], ["run a", "backward b"])
    ):
        for verb in verbs:
            table.note(rank, 4, verb)
    assert table.mismatch(0, 4) == (
        "ranks call different verbs in step 4: as number 2, rank 0 came to update a and "
        "rank 2 to backward b"
    )
    assert table.mismatch(0, 3) == table.mismatch(0, 5) == ""


def test_a_rank_may_have_begun_the_next_step():
    """Two steps are kept; verbs that find no room are left out."""
    table = VerbTable(2)
    for step in (7, 8, 9):
        table.note(0, step, f"update {step}")
    assert [table.of(0, step) for step in (7, 8, 9)] == [[], ["update 8"], ["update 9"]]
    for _ in range(1000):
        table.note(1, 1, "update a long name")
    assert 10 < len(table.of(1, 1)) < 1000 and set(table.of(1, 1)) == {"update a long name"}


def test_ranks_that_somebody_else_started_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each opens it; none is left behind, and what they opened goes on."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tables = [HeartbeatTable.of_launch("abc", 3) for _ in range(2)]
    for rank, (table, verb) in enumerate(zip(tables, ("update a", "update b"), strict=True)):
        table.write(rank, 3, "reduce")
        table.verbs.note(rank, 3, verb)
    for table in tables:
        table.remove()

    assert "rank 1 came to update b and rank 0 to update a" in tables[0].verbs.mismatch(1, 3)
    assert [str(tables[0].read(rank)) for rank in range(3)] == [
        *["step 3 (reduce)"] * 2,
        "start (start)",
    ]
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_condition_on_a_rank_s_own_samples(tmp_path: Path):
    """It holds on one rank alone. The ranks then exchange different figures, or gloo aborts one, which says nothing of
    the step; the run ends there."""
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
    with pytest.raises(
        RankFailed, match=r"different verbs in step \d: as number 2, rank \d came to ctx\."
    ) as failed:
        pl.train(job, "data=2", run=tmp_path / "run", check=False)
    assert "ctx.backward('b')" in str(failed.value) and "ctx.update('a')" in str(failed.value)
