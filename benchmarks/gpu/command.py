"""Running a command of a check in a process of its own, so that none can spoil the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.turns import ROOT
from paceline.strategies.plan import Plan

PYTHON = (sys.executable,)
PACELINE = ("-m", "tests.devices.shared_gpu", "paceline")  # whose ranks may share a GPU
Given, Made = TypeVar("Given"), TypeVar("Made")
TIMEOUT_S = 300.0  # torch takes some seconds to start CUDA, and a compiled model a minute
PATIENCE_S = 100.0  # of a training: a rank that hangs is named while its command still runs
SAID_CHARACTERS = 3000


@dataclass(frozen=True, slots=True)
class Ended:
    """exit_code: None if it took too long and was ended."""

    exit_code: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def reason(self) -> str:
        """Why it failed, in a line."""
        if self.exit_code is None:
            return f"took longer than {self.seconds:.0f} s; {self._told}".removesuffix("; ")
        return self._told or f"exit code {self.exit_code}"

    @property
    def _told(self) -> str:
        """Its line about an error or a rank that hangs, with what follows a colon; else the last one."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        marked = (
            number
            for mark in ("error", "warning: rank")
            for number, line in enumerate(lines)
            if mark in line.lower()
        )
        first = next(marked, len(lines) - 1)
        announces = bool(lines) and lines[first].endswith(":")
        return " ".join(lines[first : first + 1 + announces])[:300]

    @property
    def stderr_tail(self) -> str:
        """The end of what it wrote for people."""
        return self.stderr.strip()[-SAID_CHARACTERS:]


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """The command, from the root of the project, as a group of processes that can be ended at once."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], started_s: float, *, timeout_s: float = TIMEOUT_S) -> Ended:
    """What came of it; nothing of it is left running."""
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        return Ended(None, output, errors, timeout_s)
    return Ended(process.returncode, output, errors, time.monotonic() - started_s)


def run(command: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> Ended:
    """What came of a command."""
    return end(start(command), time.monotonic(), timeout_s=timeout_s)


def beside(jobs: int, made: Callable[[Given], Made], given: Iterable[Given]) -> Iterator[Made]:
    """What is made of each, in their order, so many at a time."""
    with ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(made, given)


def devices(plan: str, gpus: int) -> str:
    """A GPU for each rank of a plan that computes on one; where there are too few, ranks share the first."""
    read = Plan.parse(plan)
    needed = read.world_size - read.num_cpu_ranks
    if needed > gpus:
        return ",".join(["cuda:0"] * needed)
    return f"cuda:0-{needed - 1}" if needed > 1 else "cuda:0"


def train(
    python: Sequence[str], job: str, plan: str, devices: str, run_dir: Path, *options: str
) -> list[str]:
    """The command that trains a job of `jobs.py`, whose result is JSON on stdout.

    Args:
        python: What runs Python.
        job: The function of the file.
        options: More of the command; one that is given twice counts as it comes last.
    """
    return [
        *python,
        *PACELINE,
        "train",
        f"{Path(__file__).with_name('jobs.py')}:{job}",
        "--plan",
        plan,
        "--devices",
        devices,
        "--run",
        str(run_dir),
        "--json",
        "--timeout",
        f"{PATIENCE_S:g}",
        *options,
    ]
