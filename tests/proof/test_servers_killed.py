"""Killed ranks of runs with parameter servers: the run ends, and every step is in its weights once.

The job's gradient does not depend on its weights. So whatever misses whose updates, and whoever died, the final weights
are the sum of all steps' updates: an update that is lost, made twice or made in part shows.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from jobs.classification import classification_job
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline
from paceline.strategies.plan import Plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
TIMEOUT_S = 20


class Linear(nn.Module):
    """Parameters enough for two servers, one of which is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(6, 4, dtype=torch.float64),
            nn.Linear(6, 4, dtype=torch.float64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + 2 * self.second(x)


class Slow(torch.utils.data.Dataset[Any]):
    """Samples that take some time, so that there is time for a kill."""

    def __init__(self, sample_s: float) -> None:
        self.sample_s = sample_s
        self.x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        time.sleep(self.sample_s)
        return self.x[index], index / 24


def _job(epochs: int, *, sample_s: float = 0.002) -> paceline.Job:
    return classification_job(
        Linear,
        data=Slow(sample_s),
        epochs=epochs,
        loss=lambda output, y: (output * y.unsqueeze(1)).mean(),
    )


class Run:
    """A run in a process of its own, whose ranks get signals."""

    def __init__(
        self,
        start_child: Callable[..., Any],
        folder: Path,
        job: paceline.Job,
        plan: str,
        **options: Any,
    ) -> None:
        self.folder, self.job = folder, job
        self.single = _job(job.epochs or 0, sample_s=0.0)  # the same, at once
        self.child = start_child(
            lambda: paceline.train(job, plan, run=folder, **{"timeout_s": TIMEOUT_S, **options})
        )

    def steps(self) -> list[int]:
        """Of the updates in metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [
            json.loads(line)["step"] for line in lines if line.endswith("\n") and '"loss"' in line
        ]

    def pid(self, rank: int) -> int | None:
        for process in psutil.Process(self.child.pid).children(recursive=True):
            with suppress(psutil.Error):
                if any(
                    file.path.endswith(f"logs/rank-{rank}.log") for file in process.open_files()
                ):
                    return process.pid
        return None

    def send(self, number: int, rank: int) -> None:
        pid = self.pid(rank)
        assert pid is not None, f"rank {rank} does not run"
        os.kill(pid, number)

    def summary(self, wait_for: Callable[..., None]) -> dict[str, Any]:
        """Of the run, once it is over: all steps once, in the metrics and in the weights."""
        try:
            assert self.child.exit_code() == 0, self.child.stderr
        finally:
            print(self.child.stderr)
        summary = json.loads((self.folder / "summary.json").read_text())
        total = self.job.total_steps
        assert total is not None
        assert (
            self.steps() == list(range(1, total + 1)) and summary["samples"] == self.job.epochs * 24
        )
        paceline.train(self.single, "single", run=self.folder.with_name("single"))
        actual, expected = (
            load_file(folder / "model.safetensors")
            for folder in (self.folder, self.folder.with_name("single"))
        )
        assert all(
            torch.allclose(actual[name], expected[name], rtol=0, atol=1e-12) for name in expected
        )
        return summary


@pytest.fixture
def start_run(tmp_path: Path, start_child: Callable[..., Any]) -> Callable[..., Run]:
    return lambda job, plan, **options: Run(start_child, tmp_path / "run", job, plan, **options)


@pytest.mark.slow
def test_a_killed_worker_comes_back(start_run: Callable[..., Run], wait_for: Callable[..., None]):
    """Both workers of a run, one after the other, and then the last two at once."""
    run = start_run(_job(20, sample_s=0.006), "servers=1 workers=2 staleness=1", restarts=4)
    wait_for(lambda: len(run.steps()) > 5)
    run.send(signal.SIGKILL, 1)
    wait_for(lambda: "worker 0 is back" in run.child.stderr)
    for rank in (1, 2):
        run.send(signal.SIGKILL, rank)
    summary = run.summary(wait_for)
    assert sorted(summary["workers_lost"]) == sorted(summary["workers_rejoined"]) == [0, 0, 1]
    assert summary["servers_lost"] == [] and summary["updates_lost"] == 0
    assert sum(summary["staleness"].values()) == 20 * 3 * 2  # updates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "rank", "save_every"),
    [
        ("servers=2 workers=2 staleness=inf", 1, 10),
        ("servers=2 workers=1 staleness=1", 0, None),
        ("servers=2 workers=2 staleness=inf colocate=yes", 1, 7),
    ],
)
def test_a_killed_server_comes_back(
    start_run: Callable[..., Run],
    wait_for: Callable[..., None],
    plan: str,
    rank: int,
    save_every: int | None,
):
    """From the newest copies of all servers or a checkpoint, whichever is newer; what was made since is counted."""
    run = start_run(_job(24), plan, save_every=save_every)
    wait_for(lambda: len(run.steps()) > 15)
    run.send(signal.SIGKILL, rank)
    summary = run.summary(wait_for)
    assert summary["servers_lost"] == [rank]
    workers = Plan.parse(plan).sync.workers
    lost_steps = summary["updates_lost"] / workers
    assert 0 <= lost_steps < 15
    assert (
        summary["workers_lost"]
        == summary["workers_rejoined"]
        == ([rank] if "colocate" in plan else [])
    )


@pytest.mark.parametrize(
    "plan", ["servers=1 workers=2", pytest.param("data=2", marks=pytest.mark.slow)]
)
def test_exact_plans_restart_when_asked(
    start_run: Callable[..., Run], wait_for: Callable[..., None], plan: str
):
    """With restarts all ranks go on from where the newest state of all of them is."""
    run = start_run(_job(16), plan, save_every=4, restarts=1)
    wait_for(lambda: len(run.steps()) > 9)
    run.send(signal.SIGKILL, 1)
    run.summary(wait_for)
    assert "all ranks start again (0 restarts left)" in run.child.stderr


def _own_job(epochs: int, *, sample_s: float = 0.002) -> paceline.Job:
    """Two updates a step, and an average of what one of them trains."""

    def step(ctx: paceline.StepContext, batch: Any) -> None:
        for name in ("one", "two"):
            ctx.backward(
                name, batch, lambda output, batch: (output * batch.target.unsqueeze(1)).mean()
            )
            ctx.update(name)

    sgd = lambda named: torch.optim.SGD(named, lr=0.1)  # noqa: E731
    return paceline.Job(
        models={"one": Linear, "two": Linear},
        optimizers={"one": sgd, "two": sgd},
        training_step=step,
        followers={"average": paceline.ema("one", 0.9)},
        data=Slow(sample_s),
        batch=10,
        epochs=epochs,
        precision="float64",
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_steps_of_a_job_s_own_are_taken_once(
    start_run: Callable[..., Run], wait_for: Callable[..., None], rank: int
):
    """A server or a worker is killed in the middle of a step; followers come back with the checkpoint."""
    run = start_run(_own_job(10), "servers=2 workers=2", save_every=4, restarts=1)
    run.single = _own_job(10, sample_s=0.0)
    wait_for(lambda: len(run.steps()) > 9)
    run.send(signal.SIGKILL, rank)
    run.summary(wait_for)
    assert "all ranks start again (0 restarts left)" in run.child.stderr


def test_restarts_run_out(start_run: Callable[..., Run], wait_for: Callable[..., None]):
    """Then a server's death ends the run, with its rank named."""
    run = start_run(_job(100), "servers=1 workers=2 staleness=inf", restarts=1)
    wait_for(lambda: len(run.steps()) > 3)
    run.send(signal.SIGKILL, 2)
    wait_for(lambda: "worker 1 is back" in run.child.stderr)
    run.send(signal.SIGKILL, 0)
    assert run.child.exit_code() == 4
    assert "rank 0" in run.child.stderr and "killed by SIGKILL" in run.child.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "servers=2 workers=3 staleness=inf",
        "servers=2 workers=3 staleness=2",
        "servers=2 workers=3 staleness=inf colocate=yes",
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_ten_kills(
    start_run: Callable[..., Run], wait_for: Callable[..., None], plan: str, seed: int
):
    """At random moments a worker, then a server, and so on."""
    rng = random.Random(seed)
    run = start_run(_job(300, sample_s=0.004), plan, save_every=20, restarts=10, timeout_s=60)
    wait_for(lambda: len(run.steps()) > 3)
    first_worker = 0 if "colocate" in plan else 2
    killed: list[int] = []
    while len(killed) < 10:
        time.sleep(rng.uniform(0.2, 2.5))
        rank = rng.randrange(2) if len(killed) % 2 else first_worker + rng.randrange(3)
        if run.pid(rank) is not None:
            run.send(signal.SIGKILL, rank)
            killed.append(rank)
            # One that dies while all are ended anyway is nobody's loss.
            wait_for(lambda: run.child.stderr.count(" left)") == len(killed))
    summary = run.summary(wait_for)
    assert sorted(summary["servers_lost"]) == sorted(rank for rank in killed if rank < 2)
    assert sorted(summary["workers_lost"]) == sorted(
        r - first_worker for r in killed if r >= first_worker
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_server_that_stalls(
    start_run: Callable[..., Run], wait_for: Callable[..., None], rank: int
):
    """It is as good as dead, and it is the one that is blamed: workers that waited for it were not lost."""
    run = start_run(
        _job(60), "servers=2 workers=2 staleness=inf", timeout_s=6, save_every=10, restarts=1
    )
    wait_for(lambda: len(run.steps()) > 5)
    run.send(signal.SIGSTOP, rank)
    summary = run.summary(wait_for)
    assert summary["servers_lost"] == [rank] and summary["workers_lost"] == []


@pytest.mark.slow
def test_a_worker_that_wakes_up_does_no_harm(
    start_run: Callable[..., Run], wait_for: Callable[..., None]
):
    """Given up after half the timeout; it ends when it wakes up, and comes back as a new one."""
    run = start_run(_job(300, sample_s=0.004), "servers=2 workers=2 staleness=1", timeout_s=8)
    wait_for(lambda: len(run.steps()) > 5)
    run.send(signal.SIGSTOP, 3)
    wait_for(lambda: "worker 1 is gone" in run.child.stderr)
    run.send(signal.SIGCONT, 3)
    wait_for(lambda: "worker 1 is back" in run.child.stderr)
    run.send(signal.SIGSTOP, 2)  # and one that does not wake up
    wait_for(lambda: "worker 0 is back" in run.child.stderr)
    summary = run.summary(wait_for)
    assert summary["workers_lost"] == summary["workers_rejoined"] == [1, 0]
