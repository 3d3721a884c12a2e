"""A batch file of `paceline launch slurm`, run by a real slurmctld and slurmd."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file

from paceline.launch.files import LaunchRequest, text

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(600)]
DIGITS = Path(__file__).parents[2] / "examples" / "01_digits.py"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """The environment of a Slurm of one node with two cores."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None:
        pytest.skip("slurmctld and slurmd are not here (Debian's package slurm-wlm)")
    if os.geteuid() != 0:
        pytest.skip("a Slurm of one's own runs as root")
    host, ports = socket.gethostname().partition(".")[0], [free_port(), free_port()]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "paceline").write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    (tmp_path / "bin" / "paceline").chmod(0o755)
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(f"""
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={tmp_path}/state
SlurmdSpoolDir={tmp_path}/spool
SlurmctldPidFile={tmp_path}/slurmctld.pid
SlurmdPidFile={tmp_path}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
    environment = {**os.environ, "SLURM_CONF": str(configuration), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    daemons = []
    for name in ("slurmctld", "slurmd"):
        with open(tmp_path / f"{name}.txt", "w") as printed:
            daemons.append(subprocess.Popen([name, "-D"], env=environment, stdout=printed, stderr=subprocess.STDOUT))
    try:
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def submit(environment: Mapping[str, str], folder: Path, request: LaunchRequest) -> str:
    """Returns the job's number, as soon as the node takes jobs."""
    file = folder / "job.sh"
    file.write_text(text("slurm", request))
    for _ in range(60):
        answer = subprocess.run(["sbatch", "--parsable", str(file)], env=environment, cwd=folder, capture_output=True,
                                text=True)
        if answer.returncode == 0:
            return answer.stdout.strip()
        time.sleep(0.5)
    raise AssertionError(answer.stderr)


def state(environment: Mapping[str, str], number: str) -> dict[str, str]:
    shown = subprocess.run(["scontrol", "show", "job", number], env=environment, capture_output=True, text=True).stdout
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def wait_for(environment: Mapping[str, str], number: str, folder: Path, *, states: set[str], timeout_s: float = 180,
             ) -> dict[str, str]:
    deadline = time.monotonic() + timeout_s
    while (now := state(environment, number)).get("JobState") not in states:
        printed = [file.read_text()[-2000:] for file in folder.glob("*.out")]
        assert time.monotonic() < deadline, (now.get("JobState"), now.get("Reason"), printed)
        time.sleep(0.5)
    return now


def test_two_tasks_give_the_weights_of_one_device(cluster: Mapping[str, str], tmp_path: Path):
    """A run that Slurm stops with USR1 saves, is queued again by the file, goes on, and ends as one device does."""
    command = ["train", str(DIGITS), "--plan", "data=2", "--steps", "3000", "--run", str(tmp_path / "two")]
    number = submit(cluster, tmp_path, LaunchRequest(command))
    metrics = tmp_path / "two" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 20:
        assert time.monotonic() < deadline, [file.read_text()[-2000:] for file in tmp_path.glob("*.out")]
        time.sleep(0.2)
    subprocess.run(["scancel", "--signal=USR1", number], env=cluster, check=True)  # as 120 s before the time limit
    deadline = time.monotonic() + 120
    while int(state(cluster, number).get("Restarts", 0)) < 1:
        assert time.monotonic() < deadline, [file.read_text()[-2000:] for file in tmp_path.glob("*.out")]
        time.sleep(0.5)
    printed = tmp_path / f"digits-{number}.out"
    assert "stopped by SIGUSR1" in printed.read_text()
    wait_for(cluster, number, tmp_path, states={"PENDING"})
    subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], env=cluster)  # it is held for a while
    wait_for(cluster, number, tmp_path, states={"COMPLETED"}, timeout_s=300)
    assert "resumed from step-" in printed.read_text()
    one = [sys.executable, "-m", "paceline", "train", str(DIGITS), "--plan", "single", "--steps", "3000", "--run",
           str(tmp_path / "one")]
    subprocess.run(one, check=True, timeout=200)
    weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
    assert max(float((weights[name] - expected[name]).abs().max()) for name in expected) < 1e-2
