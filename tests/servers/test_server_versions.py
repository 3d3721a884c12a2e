"""With staleness, weights that are sent have the updates that they are said to have, whenever they are asked for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.servers.serve import ShardService
from paceline.servers.shard_memory import ShardMemory

STEPS = 12


class Counter(nn.Module):
    """Its weight falls by 1 in each update and is its output, so that a loss tells which updates the weight had."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002)  # as long as an update and a fetch, about
        return self.weight.expand(len(x))


def updates_had(tmp_path: Path, plan: str) -> list[tuple[int, int]]:
    """Of each update of a run: those that its weights had by its loss, and by the staleness that it is said to have."""
    job = paceline.Job(
        model=Counter,
        data=[(torch.zeros(1), torch.zeros(1)) for _ in range(4)],
        batch=2,
        steps=STEPS,
        loss=lambda output, target: output.mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
    )
    paceline.train(job, plan, run=tmp_path / "run", check=False)
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    rows = [row for row in rows if "staleness" in row]
    return [(round(-row["loss"]), number - row["staleness"]) for number, row in enumerate(rows)]


def slowly(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool) -> None:
    """Let a method take some milliseconds before what it does, or after it."""
    method = getattr(owner, name)

    def slow(*args: Any) -> Any:
        if not after:
            time.sleep(0.02)
        result = method(*args)
        if after:
            time.sleep(0.02)
        return result

    monkeypatch.setattr(owner, name, slow)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan", ["servers=1 workers=1 staleness=2", "servers=1 workers=1 staleness=inf colocate=yes"]
)
def test_weights_of_an_update_that_was_just_made_count_as_having_it(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slowly(monkeypatch, ShardService, "made", after=False)
    update_counts = updates_had(tmp_path, plan)
    assert len(update_counts) == STEPS and all(
        had == reported for had, reported in update_counts
    ), update_counts


def test_rounded_weights_count_as_having_no_update_that_came_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slowly(monkeypatch, ShardMemory, "sent", after=True)
    update_counts = updates_had(tmp_path, "servers=1 workers=1 staleness=2 compress=bf16")
    assert len(update_counts) == STEPS and all(
        had == reported for had, reported in update_counts
    ), update_counts
