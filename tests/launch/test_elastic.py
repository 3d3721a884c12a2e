"""Hosts that come and go: the run goes on with those that are there, and each sample counts once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.jobfile import JobFile
from paceline.launch.namespaces import NetworkHost, NoNamespaces, network_hosts
from paceline.runtime.checkpoint.dtypes import load_tensors

JOB = """
import os, signal, time, torch, paceline as pl
from pathlib import Path
from torch.utils.data import TensorDataset

def job(mark: str = "", pause_s: float = 0.0):
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(50, 8, generator=source).double()
    calls = []

    def loss(output, target):
        calls.append(None)
        time.sleep(pause_s)
        if mark and len(calls) == 8 and os.environ["RANK"] == "1" and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.mse_loss(output, target)

    return pl.Job(model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)),
                  data=TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh()), loss=loss, batch=12, steps=12,
                  optimizer=lambda named: torch.optim.AdamW(named, lr=0.01), precision="float64")
"""
PACELINE = [sys.executable, "-m", "paceline", "train"]


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path / "job.py"


def environ(index: int, num_hosts: int, address: str, port: int) -> dict[str, str]:
    return {**os.environ, "PET_NNODES": str(num_hosts), "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": address,
            "PET_MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def starts(run: Path) -> list[tuple[int, str]]:
    """After which step each launch went on, and under which plan."""
    lines = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return [(line["after"], line["plan"]) for line in lines if "after" in line]


def difference(run: Path, other: Path) -> float:
    one, two = (load_tensors(path / "model.safetensors") for path in (run, other))
    return max(float((one[name] - two[name]).abs().max()) for name in one)


@pytest.mark.timeout(120)
def test_a_rank_that_is_killed_on_one_of_two_hosts(tmp_path: Path, job_file: Path):
    """All ranks start again, the weights are those of an undisturbed run bit by bit, and each host says who died."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*PACELINE, str(job_file), "--run", str(tmp_path / "run"), "--plan", "data=2", "--hosts", "1:2",
               "--patience", "20", "--save-every", "3", "--set", f"mark={tmp_path / 'killed'}"]
    hosts = [subprocess.Popen(command, env=environ(index, 2, "127.0.0.1", port), stderr=subprocess.PIPE, text=True)
             for index in range(2)]
    said = [host.communicate(timeout=100)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert all("rank 1 on" in text and "killed by SIGKILL; all ranks start again" in text for text in said), said
    (first, *_), (again, plan) = starts(tmp_path / "run")
    assert first == 0 and again in (3, 6) and plan == "data=2"  # the save of step 6 may not have been complete
    assert pl.audit(tmp_path / "run").passed
    pl.train(JobFile.parse(str(job_file), {}), "data=2", run=tmp_path / "whole", check=False, table=False)
    assert difference(tmp_path / "run", tmp_path / "whole") == 0.0


# --- Three hosts in namespaces --------------------------------------------------------------------------------------


@pytest.fixture
def three_hosts() -> Iterator[list[NetworkHost]]:
    try:
        with network_hosts(3) as hosts:
            yield hosts
    except NoNamespaces as error:
        pytest.skip(str(error))


def wait_until(condition: Callable[[], bool], said: Callable[[], Any], *, timeout_s: float = 60.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, said()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", ["data=3", "shard=3"])
def test_a_host_is_cut_off_and_comes_back(three_hosts: list[NetworkHost], tmp_path: Path, job_file: Path, plan: str):
    """The run goes on with two hosts, takes the third back, and the journal has every sample once."""
    run = tmp_path / "run"

    def start(index: int) -> subprocess.Popen[bytes]:
        command = [*PACELINE, str(job_file), "--run", str(run), "--plan", plan, "--hosts", "2:3", "--patience", "4",
                   "--save-every", "5", "--steps", "400", "--set", "pause_s=0.1"]
        with (tmp_path / f"host-{index}").open("w") as stderr:
            return subprocess.Popen(["ip", "netns", "exec", three_hosts[index].name, *command], stderr=stderr,
                                    env=environ(index, 3, three_hosts[0].address, 29500))

    def said() -> list[str]:
        return [(tmp_path / f"host-{index}").read_text()[-2000:] for index in range(3)]

    def recorded() -> int:
        metrics = run / "metrics.jsonl"
        return metrics.read_text().count("step_s") if metrics.exists() else 0

    hosts = [start(index) for index in range(3)]
    try:
        wait_until(lambda: recorded() >= 12, said)
        three_hosts[2].cut()
        wait_until(lambda: len(starts(run)) == 2, said)
        assert "rank 2 on " in said()[0] and "(10.78.0.3): it can't be reached" in said()[0]
        wait_until(lambda: recorded() >= 25, said)
        three_hosts[2].heal()
        wait_until(lambda: starts(run)[-1][1] == plan, said)
        wait_until(lambda: recorded() >= starts(run)[-1][0] + 10, said)
        hosts[0].send_signal(signal.SIGTERM)
        wait_until(lambda: hosts[0].poll() is not None, said)
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    assert hosts[0].returncode == 5, said()
    assert {text for _, text in starts(run)[1:-1]} == {plan.replace("3", "2")}
    subprocess.run([*PACELINE, str(job_file), "--run", str(run), "--plan", plan, "--steps", "400", "--resume"],
                   check=True, timeout=100, capture_output=True)
    found = pl.audit(run)
    assert found.passed, found.describe()
    assert found.updates == 400
    subprocess.run([*PACELINE, str(job_file), "--run", str(tmp_path / "whole"), "--plan", plan, "--steps", "400",
                    "--check", "no"], check=True, timeout=100, capture_output=True)
    assert difference(run, tmp_path / "whole") < 1e-9
