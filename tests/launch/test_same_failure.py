"""One failure under every launcher: the same first line for the user, once, and the same summary for programs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conditions import until

from tests.commands import Command, free_port

JOB = """
import errno, os, signal, time
import torch, torch.distributed as dist
import paceline as pl
from paceline.checkpoint import write

class Net(torch.nn.Linear):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + self.training
        if self.calls == 3 and dist.get_rank() == 0 and kind == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.calls == 3 and dist.get_rank() == 1:
            act(self)
        return super().forward(x)

def act(net):
    if kind == "error":
        raise ValueError("a layer is missing")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(7)
    if kind == "hang":
        time.sleep(1000)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "NaN":
        with torch.no_grad():
            net.weight.fill_(float("nan"))
    if kind == "drift":
        net.weight.data.add_(1)
    if kind == "memory":
        net.kept = [torch.ones(50_000_000) for _ in range(100)]

class Samples(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        if index == 17 and kind == "sample":
            raise OSError("image 17 is truncated")
        if index == 17 and kind == "loader":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

class Watch(pl.Callback):
    def on_epoch(self, run, epoch):
        if kind == "callback":
            raise KeyError("a table is missing")

def model():
    if kind == "unlike" and dist.get_rank() == 1:
        return Net(4, 2, bias=False)
    net = Net(4, 2)
    if kind == "uneven":
        torch.nn.init.constant_(net.bias, dist.get_rank())
    return net

def write_tensors(path, *rest):
    if dist.get_rank() == 1:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return written(path, *rest)

written = write.write_tensors

def optimizer(named):
    return None if kind == "unbuilt" else torch.optim.SGD(named, lr=0.1)

def job(what: str = ""):
    global kind
    kind = what
    if kind == "disk":
        write.write_tensors = write_tensors
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return pl.Job(model=model, data=Samples(x, x[:, :2]), batch=8, steps=6, loss=torch.nn.functional.mse_loss,
                  optimizer=optimizer, callbacks=[Watch()])
"""
# What each kind says first, and its reason.
AT = r", at \S+job\.py:\d+"
KINDS = {
    "error": (rf"rank 1 on \S+ failed in step 3 \(forward\){AT}:", "exception"),
    "killed": (r"rank 1 on \S+ failed in step 3 \(forward\):", "peer_lost"),
    "exit": (r"rank 1 on \S+ failed in step 3 \(forward\):", "peer_lost"),
    "hang": (rf"rank 1 on \S+ failed in step 3 \(forward\){AT}:", "peer_lost"),
    "loader": (r"rank 1 on \S+ failed in step 1 \(input\):", "peer_lost"),
    "stopped": (
        r"stopped by SIGTERM( to rank 1)? after step 3; a checkpoint is saved",
        "preempted",
    ),
    "NaN": (r"rank 1 on \S+ failed in step 3 \(reduce\):", "training_error"),
    "sample": (rf"rank 1 on \S+ failed in step 2 \(input\){AT}:", "training_error"),
    "unbuilt": (r"rank [01] on \S+ failed in start \(build\):", "job_error"),
    "unlike": (r"rank [01] on \S+ failed in start \(build\):", "job_error"),
    "uneven": (r"rank [01] on \S+ failed in start \(build\):", "drift_error"),
    "drift": (r"rank [01] on \S+ failed in step 3 \(save\):", "drift_error"),
    "disk": (r"rank 1 on \S+ failed in step 7 \(save\):", "checkpoint_error"),
    "callback": (r"Traceback \(most recent call last, your code only\):", "callback_error"),
    "memory": (rf"rank 1 on \S+ failed in step 3 \(forward\){AT}:", "out_of_memory"),
}
UNBEGUN = ("unbuilt", "unlike", "uneven")  # forks leave no folder of such a run
PACELINE = [sys.executable, "-P", "-m", "paceline"]
WORDS = {
    "hang": ["--timeout", "10"],
    "frozen": ["--timeout", "10"],
    "memory": ["--memory", "700MiB"],
    "loader": ["--loader-workers", "1"],
    "drift": ["--save-every", "3"],
    "disk": ["--save-every", "6"],
}


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


@pytest.mark.sweep(1)
@pytest.mark.parametrize("launcher", ["fork", "torchrun", "Slurm"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_is_told_alike(kind: str, launcher: str, tmp_path: Path):
    """Ranks are forks of one command, or commands of their own, on one host."""
    assert_told(kind, printed_by_ranks(started(kind, launcher, tmp_path)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [kind if kind == "callback" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_a_failure_is_told_before_all_ranks_are_ended(kind: str, tmp_path: Path):
    """Once one rank has ended, torchrun's agent asks all to stop. The one that tells is not the first."""
    ranks = started(kind, "torchrun", tmp_path)
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    until(lambda: any(os.waitid(os.P_PID, rank.pid, how) for rank in ranks))
    for rank in ranks:
        os.kill(rank.pid, signal.SIGTERM)
    assert_told(kind, printed_by_ranks(ranks), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["error", "killed", "hang", "stopped", "unlike", "callback"])
def test_a_failure_under_torchruns_agent(kind: str, tmp_path: Path):
    """The agent prints a summary of its own beside it."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    agent += ["--master-port", str(free_port()), "--no-python", "--", *PACELINE]
    assert_told(kind, printed_by(agent + train(kind, tmp_path)), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_failure_under_ray(ray_cluster: Any, tmp_path: Path):
    """The ranks' failures reach the command as they are."""
    for kind in KINDS:
        (folder := tmp_path / kind).mkdir()
        words = ["--restarts", "0", "--on", f"ray:{ray_cluster.address}"]
        assert_told(kind, printed_by(PACELINE + train(kind, folder) + words), folder)


@pytest.mark.slow
def test_a_rank_that_others_wait_for_in_vain_is_told_by_another(tmp_path: Path):
    """Rank 0 is stopped, and rank 1, whose stderr leads to its log, tells on its terminal."""
    ranks = started("frozen", "Slurm", tmp_path)
    try:
        assert ranks[1].wait() == 4
    finally:
        os.killpg(ranks[0].pid, signal.SIGKILL)
        ranks[0].wait()
    printed = ranks[1].stderr.read_text()
    assert re.search(
        r"^error: rank 0 on \S+ failed in step 3 \(forward\):$", printed, re.MULTILINE
    ), printed
    assert printed.count("error: ") == 1, printed


def started(kind: str, launcher: str, folder: Path) -> list[Command]:
    port, is_fork = free_port(), launcher == "fork"
    return [
        Command(
            train(kind, folder) + ["--restarts", "0"] * is_fork,
            {**os.environ, **variables(launcher, rank, port)},
            folder / f"command-{rank}",
        )
        for rank in range(1 if is_fork else 2)
    ]


def printed_by_ranks(ranks: list[Command]) -> str:
    for rank in ranks:
        rank.wait()
    return "".join(rank.stderr.read_text() for rank in ranks)


def train(kind: str, folder: Path) -> list[str]:
    """The words of a command whose run fails in one way."""
    (folder / "job.py").write_text(JOB)
    words = ["train", str(folder / "job.py"), "--plan", "data=2", "--set", f"what={kind}"]
    return [*words, "--run", str(folder / "run"), "--check", "no", *WORDS.get(kind, [])]


def printed_by(words: list[str]) -> str:
    ended = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return ended.stderr


def assert_told(kind: str, printed: str, folder: Path) -> None:
    first_line, reason = KINDS[kind]
    assert re.search(rf"^error: {first_line}$", printed, re.MULTILINE), printed
    assert len(re.findall("^error: ", printed, re.MULTILINE)) == 1, printed
    if kind in UNBEGUN and not (folder / "run").exists():
        return
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    failure = summary["failure"]
    assert failure["reason"] == reason
    if first_line.startswith("rank"):
        assert f"error: rank {failure['rank']} on {failure['host']} failed" in printed
