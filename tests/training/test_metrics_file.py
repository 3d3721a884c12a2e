"""Figures that are not numbers, and damaged lines: a run can be told of and gone on with in spite of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

POINTS = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
ODD = {
    "no_number": lambda output, target: output.mean() * math.nan,
    "below_all": lambda output, target: -math.inf,
    "above_all": lambda output, target: torch.tensor(math.inf),
    "great": lambda output, target: 1e305,
}


def a_job(steps: int = 4, **changes: Any) -> pl.Job:
    fields: dict[str, Any] = {
        "validation": POINTS,
        "metrics": ODD,
        "callbacks": [
            pl.KeepBest("below_all"),
            pl.EarlyStopping("no_number", patience=9),
            pl.EarlyStopping("below_all", patience=9),
        ],
    }
    return pl.Job(
        model=lambda: nn.Linear(4, 2),
        data=POINTS,
        batch=4,
        steps=steps,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        **{"loss": F.cross_entropy, **fields, **changes},
    )


def is_odd(figures: dict[str, float]) -> bool:
    return (
        math.isnan(figures["no_number"])
        and figures["below_all"] == -math.inf
        and figures["above_all"] == math.inf
        and figures["great"] == 1e305
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "servers=1 workers=1"])
def test_figures_that_are_no_numbers_and_damaged_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], plan: str
):
    """NaN and infinite metrics stay figures in history and report; lines that another program or a kill has damaged
    are named and passed over, and the run goes on without them."""
    run, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    result = pl.train(a_job(), plan, run=run)
    assert is_odd(result.metrics) and is_odd(result["metrics"])
    assert pl.open(run).best_by("below_all").step == 2
    assert pl.report(run).exists()
    whole = metrics.read_bytes()
    damaged = [
        b"garbage",
        b"\xff\xfe",
        b'{"step": 4, "lo{"step": 4, "loss": 1.0}',
        b"{}",
        b"5",
        b"[" * 100_000,
        b'{"step": NaN, "loss": 1.0}',
    ]
    lines = whole.splitlines()
    metrics.write_bytes(b"\n".join([*lines[:1], *damaged, *lines[1:]]) + b'\n{"step": 4, "los')
    assert pl.report(run).exists()
    told = capfd.readouterr().err
    assert [f"{metrics} is damaged in line {number}:" in told for number in range(1, 11)] == [
        number in range(2, 9) for number in range(1, 11)
    ]
    assert pl.train(a_job(steps=6), plan, run=run, resume=True)["steps"] == 6
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_a_validation_loss_that_is_not_a_number_is_worse(tmp_path: Path):
    """A comparison fails where the second run's loss is NaN, and not where the first one's is."""
    bad = a_job(
        metrics={},
        callbacks=[],
        loss=lambda output, target: (
            F.cross_entropy(output, target) * (1.0 if output.requires_grad else math.nan)
        ),
    )
    runs = [
        pl.train(job, "single", run=tmp_path / name).run
        for name, job in (("good", a_job(callbacks=[])), ("bad", bad))
    ]
    limits = ["validation_loss>5%"]
    assert (
        pl.compare(*runs, fail_if=limits).failed
        and not pl.compare(*reversed(runs), fail_if=limits).failed
    )
    assert not pl.compare(runs[1], runs[1], fail_if=limits).failed
