"""Runs that can't go on, and how they end: too little memory, a rank that is killed, a kernel that never ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import command

# What happens, the function of jobs.py, the plan, and the exit code that docs/errors.md names.
CASES = (
    ("a forward wants more memory than the GPU has", "too_large", "single", 3),
    ("one rank of two is killed in a step", "killed", "data=2", 4),
    ("a kernel of one rank of two does not end", "endless", "data=2", 4),
)
PATIENCE_S = 5


def failures(
    gpus: int, folder: Path, python: Sequence[str], out_of_time: Callable[[], bool], jobs: int = 1
) -> Iterator[dict[str, Any]]:
    """A row a case, so many at a time. seconds_to_end: from the failure to the end of the command, where the job notes
    its time."""

    def row_of(case: tuple[str, str, str, int]) -> dict[str, Any]:
        name, job, plan, expected = case
        devices = command.devices(plan, gpus)
        row: dict[str, Any] = {
            "failure": name,
            "plan": plan,
            "devices": devices,
            "expected_exit_code": expected,
        }
        if out_of_time():
            row |= {"verdict": "not run", "reason": "the time was up"}
        else:
            row |= _tried(folder / job, job, plan, devices, expected, python)
        return row

    return command.beside(jobs, row_of, CASES)


def _tried(
    folder: Path, job: str, plan: str, devices: str, expected: int, python: Sequence[str]
) -> dict[str, Any]:
    folder.mkdir()
    failed = folder / "failed-at"
    settings = ["--set", f"failed={failed}"] if job != "too_large" else []
    ended = command.run(
        command.train(
            python,
            job,
            plan,
            devices,
            folder / "run",
            "--check",
            "no",
            "--restarts",
            "0",
            "--timeout",
            str(PATIENCE_S),
            *settings,
        )
    )
    row = {
        "verdict": "as expected" if ended.exit_code == expected else "differs",
        "exit_code": ended.exit_code,
        "reason": ended.reason if ended.exit_code != expected else "",
        "stderr_tail": ended.stderr_tail,
    }
    return (
        {**row, "seconds_to_end": time.time() - float(failed.read_text())}
        if failed.exists()
        else row
    )
