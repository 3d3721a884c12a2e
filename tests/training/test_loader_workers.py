"""Processes that read a rank's data end with it, and are named where they hang or fail."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, get_worker_info

import paceline as pl
from paceline.base.errors import PacelineError
from paceline.launch.local import ranks
from paceline.launch.process import watchdog

POINTS = TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)


@pytest.fixture
def quick(nothing_left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.5)
    monkeypatch.setattr(ranks, "_GRACE_S", 1.5)


def a_job(action: Callable[[], Any], *, loss: Any = F.cross_entropy) -> pl.Job:
    """The second loader worker of each rank does something else with each batch."""

    def collate(samples: list[Any]) -> Any:
        worker = get_worker_info()
        if worker is not None and worker.id == 1:
            action()
        return torch.utils.data.default_collate(samples)

    return pl.Job(
        model=lambda: nn.Linear(4, 2),
        data=DataLoader(POINTS, batch_size=4, num_workers=2, collate_fn=collate),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        epochs=1,
    )


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, which ends a process with its parent"
)
def test_a_hung_worker_ends_with_a_killed_command(
    tmp_path: Path, start_child: Any, wait_for: Callable[..., None]
):
    """The command is killed while a loader worker hangs, and so does a process that the job started itself: the worker
    ends, and the other one holds nothing of the run, which goes on."""
    pids, run, own = tmp_path / "workers", tmp_path / "run", tmp_path / "own"
    pids.mkdir()

    def hang() -> None:
        (pids / str(os.getpid())).touch()
        time.sleep(1000)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not own.exists():
            own.write_text(str(os.fork() or time.sleep(1000)))
        return F.cross_entropy(output, target)

    child = start_child(lambda: pl.train(a_job(hang, loss=loss), "single", run=run))
    wait_for(lambda: list(pids.iterdir()) and own.exists() and own.read_text())
    os.kill(child.pid, signal.SIGKILL)
    try:
        wait_for(lambda: not any(lives(int(path.name)) for path in pids.iterdir()))
        assert lives(int(own.read_text()))
        assert pl.train(a_job(lambda: None), "single", run=run, resume=True)["steps"] == 4
    finally:
        os.kill(int(own.read_text()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux's /proc, which lists a rank's processes"
)
@pytest.mark.usefixtures("quick")
def test_a_hung_worker_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], hang_begins: Path
):
    """Its process and its line are told at each restart and at the end, and nothing of it is left."""

    def hang() -> None:
        hang_begins.touch()
        time.sleep(1000)

    with pytest.raises(PacelineError) as raised:
        pl.train(a_job(hang), "data=2", run=tmp_path / "run", timeout_s=2, restarts=1)
    # One rank may be silent first.
    named = (
        r"rank (0|1|0, 1) did not (go on|reach the collective that the others wait for) (for|in) 2 s; rank [01] waits "
        rf"for its loader worker \(process \d+\), at {__file__}:\d+"
    )
    assert re.search(named, str(raised.value)) and raised.value.exit_code == 4
    assert re.search(named + "; all ranks start again", capfd.readouterr().err)
