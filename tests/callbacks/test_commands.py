"""Callbacks of a run that a command or a launcher starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from callback_jobs import JOB
from conditions import PATIENCE_S

import paceline as pl
from paceline.base import signals
from paceline.job.file import JobFile
from tests.commands import Command, as_ranks

BIN = Path(sys.executable).parent


def words(tmp_path: Path) -> list[str]:
    (tmp_path / "net.py").write_text(JOB)
    return [
        "train",
        str(tmp_path / "net.py"),
        "--plan",
        "data=2",
        "--check",
        "no",
        "--run",
        str(tmp_path / "run"),
    ]


def environment(planted: str = "") -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PLANTED": planted}


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", ["its environment", pytest.param("torchrun", marks=pytest.mark.slow)]
)
def test_under_torchrun_they_run_on_the_first_rank_alone(tmp_path: Path, launcher: str):
    """They hear the same as of one device, once, and the run stops after the same step."""
    if launcher == "torchrun":
        launched = subprocess.run(
            [
                str(BIN / "torchrun"),
                "--nproc-per-node",
                "2",
                "--no-python",
                "--",
                sys.executable,
                "-m",
                "paceline",
                *words(tmp_path),
            ],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert launched.returncode == 0, launched.stderr
    else:
        as_ranks(words(tmp_path), tmp_path)
    alone = pl.train(
        JobFile.parse(str(tmp_path / "net.py"), {}), "single", run=tmp_path / "alone", check=False
    )
    assert alone["steps"] < 60
    diary = (tmp_path / "run" / "diary.txt").read_text()
    assert diary == (tmp_path / "alone" / "diary.txt").read_text()
    assert diary.splitlines()[-1] == f"end {alone['steps']} True"


def test_a_callback_that_fails_ends_the_command_with_its_lines(tmp_path: Path):
    """Exit code 1, the user's traceback without ours, and a checkpoint to go on from."""
    failed = Command(words(tmp_path), environment("error"), tmp_path / "command")
    assert failed.wait() == 1
    stderr_text = failed.stderr.read_text()
    assert 'net.py", line' in stderr_text and "ZeroDivisionError: planted" in stderr_text
    assert (
        "Diary failed in on_step after step 7" in stderr_text
        and "bug in paceline" not in stderr_text
    )
    assert "a checkpoint is saved" in stderr_text and "controller.py" not in stderr_text
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/COMMIT"))


@pytest.mark.slow
def test_a_second_interrupt_ends_a_run_whose_callback_hangs(
    tmp_path: Path, wait_for: Callable[..., None]
):
    """And leaves no process."""
    diary = tmp_path / "run" / "diary.txt"
    started = Command(words(tmp_path), environment("hangs"), tmp_path / "command")
    try:
        wait_for(lambda: diary.exists() and "hangs" in diary.read_text())
        children = psutil.Process(started.pid).children(recursive=True)
        os.killpg(started.pid, signal.SIGINT)
        wait_for(lambda: "asked" in diary.read_text())
        time.sleep(signals.SAME_REQUEST_S + 0.1)  # what comes before is the same request
        os.killpg(started.pid, signal.SIGINT)
        assert started.wait() not in (0, -signal.SIGKILL)
        assert children and not psutil.wait_procs(children, timeout=PATIENCE_S)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
