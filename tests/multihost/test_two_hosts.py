"""Two hosts as network namespaces behind a bridge train to the weights of one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.job.file import JobFile
from tests.commands import as_ranks
from tests.namespaces import NetworkHost

EXAMPLE = Path(__file__).parents[2] / "examples" / "01_digits.py"
PACELINE = [sys.executable, "-P", "-m", "paceline"]
JOB = """
import torch, paceline as pl
from torch.utils.data import TensorDataset

def job():
    inputs = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    return pl.Job(model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)),
                  data=TensorDataset(inputs, inputs.sum(1, keepdim=True)), loss=torch.nn.functional.mse_loss, batch=12,
                  optimizer=lambda named: torch.optim.AdamW(named, lr=0.01), steps=10)
"""


def assert_equal_weights(run: Path, other: Path) -> None:
    weights, other_weights = (load_file(path / "model.safetensors") for path in (run, other))
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.mark.root
def test_two_hosts_reach_the_weights_of_one(hosts: Sequence[NetworkHost], tmp_path: Path) -> None:
    """The same plan across two hosts gives the same weights; gloo finds the interface by itself."""
    file = tmp_path / "job.py"
    file.write_text(JOB)
    as_ranks(
        ["train", str(file), "--plan", "data=2", "--check", "no", "--run", str(tmp_path / "two")],
        tmp_path,
        hosts=hosts,
    )
    paceline.train(JobFile(file), "data=2", run=tmp_path / "one", check=False)
    assert_equal_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("plan", "secret"),
    [("data=2", {}), ("servers=1 workers=1", {"PACELINE_SECRET": "ab" * 32})],
)
def test_two_hosts_under_torchrun_reach_the_weights_of_one(
    hosts: Sequence[NetworkHost], tmp_path: Path, plan: str, secret: dict[str, str]
) -> None:
    """Also where all hosts have a secret."""
    arguments = [str(EXAMPLE), "--plan", plan, "--steps", "10", "--set", "width=8", "--check", "no"]
    # One thread a rank on both sides: another number of threads sums in another order.
    environ = {
        k: v for k, v in os.environ.items() if not k.startswith(("GLOO", "MASTER", "RANK", "WORLD"))
    }
    environ["OMP_NUM_THREADS"] = "1"
    nodes = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                host.name,
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--node-rank",
                str(rank),
                "--nproc-per-node",
                "1",
                "--master-addr",
                "10.78.0.1",
                "--master-port",
                "29400",
                "--no-python",
                "--",
                *PACELINE,
                "train",
                *arguments,
                "--run",
                str(tmp_path / "two"),
            ],
            env={**environ, **secret},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        outputs = [node.communicate(timeout=400)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    paceline.train(
        JobFile.parse(str(EXAMPLE), {"width": 8}), plan, steps=10, run=tmp_path / "one", check=False
    )
    assert_equal_weights(tmp_path / "one", tmp_path / "two")
