"""A batch file of `paceline launch slurm`, run by a real slurmctld and slurmd."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.api.launch_files import LaunchRequest, text

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(600)]
DIGITS = Path(__file__).parents[2] / "examples" / "01_digits.py"


def submit(environment: Mapping[str, str], folder: Path, request: LaunchRequest) -> str:
    """Returns the job's number, as soon as the node takes jobs."""
    file = folder / "job.sh"
    file.write_text(text("slurm", request))
    for _ in range(60):
        answer = subprocess.run(
            ["sbatch", "--parsable", str(file)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if answer.returncode == 0:
            return answer.stdout.strip()
        time.sleep(0.5)
    raise AssertionError(answer.stderr)


def state(environment: Mapping[str, str], number: str) -> dict[str, str]:
    shown = subprocess.run(
        ["scontrol", "show", "job", number], env=environment, capture_output=True, text=True
    ).stdout
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def wait_for(
    environment: Mapping[str, str],
    number: str,
    folder: Path,
    *,
    states: set[str],
    timeout_s: float = 180,
) -> dict[str, str]:
    deadline = time.monotonic() + timeout_s
    while (now := state(environment, number)).get("JobState") not in states:
        printed = [file.read_text()[-2000:] for file in folder.glob("*.out")]
        assert time.monotonic() < deadline, (now.get("JobState"), now.get("Reason"), printed)
        time.sleep(0.5)
    return now


def test_a_run_that_is_queued_again_ends_with_the_weights_of_one_that_was_not(
    slurm: Mapping[str, str], tmp_path: Path
):
    """Slurm stops a run with USR1: it saves, is queued again by the file, and goes on. Bit by bit."""
    command = [
        "train",
        str(DIGITS),
        "--plan",
        "data=2",
        "--steps",
        "1500",
        "--set",
        "width=8",
        "--run",
    ]
    number = submit(
        {**slurm, "OMP_NUM_THREADS": "1"},
        tmp_path,
        LaunchRequest([*command, str(tmp_path / "stopped")]),
    )
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 20:
        assert time.monotonic() < deadline, [
            file.read_text()[-2000:] for file in tmp_path.glob("*.out")
        ]
        time.sleep(0.2)
    subprocess.run(
        ["scancel", "--signal=USR1", number], env=slurm, check=True
    )  # as 120 s before the time limit
    deadline = time.monotonic() + 120
    while int(state(slurm, number).get("Restarts", 0)) < 1:
        assert time.monotonic() < deadline, [
            file.read_text()[-2000:] for file in tmp_path.glob("*.out")
        ]
        time.sleep(0.5)
    printed = tmp_path / f"digits-{number}.out"
    assert "stopped by SIGUSR1" in printed.read_text()
    wait_for(slurm, number, tmp_path, states={"PENDING"})
    subprocess.run(
        ["scontrol", "update", f"JobId={number}", "StartTime=now"], env=slurm
    )  # it is held for a while
    wait_for(slurm, number, tmp_path, states={"COMPLETED"}, timeout_s=300)
    assert "resumed from step-" in printed.read_text()
    here = [sys.executable, "-P", "-m", "paceline", *command, str(tmp_path / "here")]
    subprocess.run(here, check=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    weights, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("stopped", "here")
    )
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_rank_that_ends_later_does_not_keep_a_stopped_run_from_the_queue(
    slurm: Mapping[str, str], tmp_path: Path
):
    """The ranks of a run that is stopped end with exit code 5 one after the other: rank 0 prints and writes more."""
    (tmp_path / "bin" / "paceline").write_text(
        "#!/bin/sh\n[ $SLURM_PROCID = 0 ] && sleep 4\nexit 5\n"
    )
    number = submit(
        slurm, tmp_path, LaunchRequest(["train", "job.py", "--plan", "data=2", "--run", "run"])
    )
    deadline = time.monotonic() + 120
    while int((now := state(slurm, number)).get("Restarts", 0)) < 1:
        assert now.get("JobState") != "FAILED" and time.monotonic() < deadline, (
            now,
            [file.read_text() for file in tmp_path.glob("*.out")],
        )
        time.sleep(0.5)
