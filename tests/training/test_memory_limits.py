"""A job whose state is three times what a process may use: refused on one device, trained by four."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.base.errors import PlanError

MIB = 2**20
WIDTH = 1024
LAYERS = 60
# Weights, gradients and AdamW's two moments are 4 MiB each a layer.
STATE_MIB = LAYERS * 16
LIMIT_MIB = STATE_MIB // 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x + F.relu(self.linear(x)), (WIDTH,))


def large_job() -> paceline.Job:
    made = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(32, WIDTH, generator=made), torch.randn(32, WIDTH, generator=made)
    )
    return paceline.Job(
        model=lambda: nn.Sequential(*(Block() for _ in range(LAYERS))),
        data=data,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
        batch=8,
        steps=2,
    )


@pytest.mark.slow
def test_one_device_is_refused_with_the_ledger(tmp_path: Path) -> None:
    """Nothing starts; the message says what is needed for what, what there is, and which plans would fit."""
    with pytest.raises(PlanError) as caught:
        paceline.train(large_job(), "single", memory=f"{LIMIT_MIB}MiB", run=tmp_path / "run")

    message = str(caught.value)
    line = next(line for line in message.splitlines() if line.startswith("each rank"))
    weights, gradients, optimizer, *_, total = map(
        float, re.findall(r"[\d.]+", line.replace(",", ""))[:7]
    )
    assert (weights, gradients) == (240.0, 240.0)
    assert 480 <= optimizer <= 500
    assert total > 3 * LIMIT_MIB
    assert f"{LIMIT_MIB} too little" in line
    assert re.search(r"plans that fit:\n +shard=4 .*\n +pipeline=4 .*\n +place=4 ", message)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.predicted_runs
@pytest.mark.parametrize("plan", ["place=4", "shard=4", "pipeline=4"])
def test_four_ranks_train_within_the_limit(plan: str, tmp_path: Path) -> None:
    """The kernel holds each rank to the limit, and the measured peak is within a tenth of the ledger."""
    # In a process of its own: what this one has freed by now, forks would use before they grow.
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        f"{__file__}:large_job",
        "--plan",
        plan,
        "--devices",
        "cpu:0-3",
        "--memory",
        f"{LIMIT_MIB}MiB",
        "--run",
        str(tmp_path / "run"),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)

    predicted = json.loads((tmp_path / "run" / "predicted.json").read_text())
    measured = summary["peak_memory_bytes"]
    assert summary["steps"] == 2
    assert measured <= LIMIT_MIB * MIB
    assert measured == pytest.approx(sum(predicted["ledger"].values()), rel=0.1)
    assert (
        predicted["peak_memory_bytes"]
        == summary["predicted"]["peak_memory_bytes"]
        <= LIMIT_MIB * MIB
    )
