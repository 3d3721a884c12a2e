"""A run inside a test is plain in the suite, and what users run under `--whole`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def run(folder: Path) -> dict[str, Any]:
    job = pl.Job(
        model=Classifier,
        data=(torch.ones(8, 3), torch.zeros(8, dtype=torch.long)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=4,
        steps=3,
    )
    return pl.train(job, "data=2", devices="cpu:0-1", run=folder).figures


@pytest.mark.checked_runs
@pytest.mark.predicted_runs
def test_marked_runs_are_checked_and_predicted(tmp_path: Path):
    figures = run(tmp_path / "run")
    assert figures["check"]["verdict"] == "passed"
    assert figures["predicted"]["step_s"] > 0


def test_other_runs_are_so_under_whole(tmp_path: Path, pytestconfig: pytest.Config):
    figures = run(tmp_path / "run")
    assert (figures["check"] is not None) == pytestconfig.getoption("--whole")
    assert (figures["predicted"]["step_s"] is not None) == pytestconfig.getoption("--whole")
