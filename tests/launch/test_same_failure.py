"""One failure under every launcher: the same first line for the user, once, and the same summary for programs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command, free_port

JOB = """
import os, signal, time
import torch, torch.distributed as dist
import paceline as pl

class Net(torch.nn.Linear):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + self.training
        if self.calls == 3 and dist.get_rank() == 1:
            act(self)
        return super().forward(x)

def act(net):
    if kind == "error":
        raise ValueError("a layer is missing")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(1000)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "NaN":
        with torch.no_grad():
            net.weight.fill_(float("nan"))
    if kind == "memory":
        net.kept = [torch.ones(50_000_000) for _ in range(100)]

def job(what: str = ""):
    global kind
    kind = what
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    return pl.Job(model=lambda: Net(4, 2), data=(x, x[:, :2]), batch=8, steps=6, loss=torch.nn.functional.mse_loss,
                  optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
"""
# What each kind says first, and its reason.
KINDS = {
    "error": (r"rank 1 on \S+ failed in step 3 \(forward\), at \S+job\.py:\d+:", "exception"),
    "killed": (r"rank 1 on \S+ failed in step 3 \(forward\):", "peer_lost"),
    "hang": (r"rank 1 on \S+ failed in step 3 \(forward\), at \S+job\.py:\d+:", "peer_lost"),
    "stopped": (
        r"stopped by SIGTERM( to rank 1)? after step 3; a checkpoint is saved",
        "preempted",
    ),
    "NaN": (r"rank 1 on \S+ failed in step 3 \(reduce\):", "training_error"),
    "memory": (
        r"rank 1 on \S+ failed in step 3 \(forward\), at \S+job\.py:\d+:",
        "out_of_memory",
    ),
}
WORDS = {"hang": ["--timeout", "10"], "memory": ["--memory", "700MiB"]}


def variables(launcher: str, rank: int, port: int) -> dict[str, str]:
    if launcher == "fork":
        return {}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if launcher == "torchrun":
        size, place = ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("RANK", "LOCAL_RANK")
        return meeting | dict.fromkeys(size, "2") | dict.fromkeys(place, str(rank))
    size, place = ("SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE"), ("SLURM_PROCID", "SLURM_LOCALID")
    own = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    return meeting | own | dict.fromkeys(size, "2") | dict.fromkeys(place, str(rank))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("launcher", ["fork", "torchrun", "Slurm"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_is_told_alike(kind: str, launcher: str, tmp_path: Path):
    """Ranks are forks of one command, or commands of their own, on one host."""
    first_line, reason = KINDS[kind]
    (tmp_path / "job.py").write_text(JOB)
    run, port, is_fork = tmp_path / "run", free_port(), launcher == "fork"
    words = ["train", str(tmp_path / "job.py"), "--plan", "data=2", "--set", f"what={kind}"]
    words += ["--run", str(run), "--check", "no", *WORDS.get(kind, [])]
    ranks = [
        Command(
            words + ["--restarts", "0"] * is_fork,
            {**os.environ, **variables(launcher, rank, port)},
            tmp_path / f"command-{rank}",
        )
        for rank in range(1 if is_fork else 2)
    ]
    for rank in ranks:
        rank.wait()
    printed = "".join(rank.stderr.read_text() for rank in ranks)
    failure: dict[str, Any] = json.loads((run / "summary.json").read_text())["failure"]

    assert re.search(rf"^error: {first_line}$", printed, re.MULTILINE), printed
    assert printed.count("error: ") == 1, printed
    assert failure["reason"] == reason
    assert kind == "stopped" or (failure["rank"], failure["step"]) == (1, 3)
