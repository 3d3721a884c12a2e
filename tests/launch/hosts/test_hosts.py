"""A command that a cluster starts once on each host knows its place and starts the host's ranks with torch's agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from paceline.base.errors import ClusterError
from paceline.launch.hosts import agent
from paceline.launch.hosts.agent import SignalException, exit_code
from paceline.launch.hosts.host_process import Host, host
from tests.commands import as_ranks, free_port

# Recorded: what Kubeflow Trainer v2 gives the second of two nodes, and SkyPilot the second of two.
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_PORT": "29400",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-11-25_digits-1",
}


def test_each_cluster_is_known():
    assert host({}) is None
    assert host(KUBEFLOW) == Host("Kubeflow", 1, 2, 4, "digits-node-0-0.digits", 29400)
    assert host({**KUBEFLOW, "PET_NPROC_PER_NODE": "auto"}).num_ranks is None
    assert host(SKYPILOT) == Host("SkyPilot", 1, 2, 8, "10.0.0.4", 8008)
    assert host({**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}) == Host(
        "SkyPilot", 1, 2, None, "10.0.0.4", 8008
    )


def test_a_rank_and_a_single_host_start_nothing():
    assert host({**KUBEFLOW, "RANK": "0", "WORLD_SIZE": "8"}) is None
    assert host({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}) is None
    assert host({**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.4", "SKYPILOT_NUM_NODES": "1"}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**KUBEFLOW, "PET_NNODES": "4:1"}, "PET_NNODES 4:1 is no number of hosts"),
        ({**KUBEFLOW, "PET_NNODES": "two"}, "PET_NNODES two is no number of hosts"),
        ({**KUBEFLOW, "PET_NODE_RANK": "2"}, "host 2 of 2"),
        ({**KUBEFLOW, "PET_MASTER_ADDR": ""}, "meet at ''"),
        ({"PET_NNODES": "2"}, "PET_NODE_RANK is not set"),
        ({**SKYPILOT, "SKYPILOT_NUM_NODES": "3"}, "has 2 addresses"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, str], message: str):
    with pytest.raises(ClusterError, match=message):
        host(given)


def test_hosts_that_come_and_go():
    """PET_NNODES is torchrun's own variable; --hosts says the same. More hosts than take part wait as spares."""
    third = {**KUBEFLOW, "PET_NNODES": "1:2", "PET_NODE_RANK": "2"}
    assert host(third) == Host("Kubeflow", 2, 2, 4, "digits-node-0-0.digits", 29400, 1)
    for given in (KUBEFLOW, SKYPILOT):
        assert host(given, hosts="1:2").least_hosts == 1
        assert host(given, hosts="2").least_hosts == 2
        assert not host(given).is_elastic
        with pytest.raises(
            ClusterError, match=r"--hosts 2:3, and .* runs 2 hosts(.|\n)*hint: --hosts 2:2"
        ):
            host(given, hosts="2:3")
    with pytest.raises(ClusterError, match="nothing says which of them this is"):
        host({}, hosts="2:3")


def test_how_many_ranks_a_host_starts():
    """What the cluster says, else the plan, else its GPUs, else one; a plan that doesn't fit is refused."""
    told, free = Host("Kubeflow", 0, 2, 4, "a", 1), Host("SkyPilot", 0, 2, None, "a", 1)
    assert (
        told.ranks(None, 8),
        told.ranks(8, 0),
        free.ranks(6, 8),
        free.ranks(None, 8),
        free.ranks(None, 0),
    ) == (4, 4, 3, 8, 1)
    for place, world_size in ((told, 4), (free, 5)):
        with pytest.raises(ClusterError, match=f"{world_size} ranks are asked for"):
            place.ranks(world_size, 0)


@pytest.mark.parametrize(
    ("of_ranks", "expected"), [([5], 5), ([4, 1], 1), ([4, 4], 4), ([-9], 4), ([-9, 3], 3)]
)
def test_the_code_of_a_host_is_that_of_the_culprit(of_ranks: list[int], expected: int):
    assert exit_code(of_ranks) == expected


def test_a_signal_after_the_ranks_have_ended_keeps_the_code(
    start_child: Any, monkeypatch: pytest.MonkeyPatch
):
    """While Python ends, SIGTERM would kill the agent: a cluster that stops all hosts signals one after the other."""

    def stopped(arguments: list[str]) -> None:
        raise SignalException("", signal.SIGTERM)

    def end() -> None:
        code = agent.main([])
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(code)

    monkeypatch.setattr(agent.run, "main", stopped)
    assert start_child(end).exit_code() == 5


def of_kubeflow(index: int, port: int) -> dict[str, str]:
    return {
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(index),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
    }


JOB = """
import torch, paceline as pl

def job():
    return pl.Job(model=lambda: torch.nn.Linear(2, 1), data=[(torch.ones(2) * i, torch.ones(1)) for i in range(8)],
                  loss=torch.nn.functional.mse_loss, batch=4, steps=2,
                  optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
"""


def test_a_server_and_a_worker_that_a_launcher_starts_both_end_well(tmp_path: Path):
    """Rank 0 of servers alone has the run's figures. The others end with 0 all the same."""
    (tmp_path / "job.py").write_text(JOB)
    first, second = as_ranks(
        [
            "train",
            str(tmp_path / "job.py"),
            "--check",
            "no",
            "--plan",
            "servers=1 workers=1",
            "--run",
            str(tmp_path / "run"),
            "--json",
        ],
        tmp_path,
    )
    assert json.loads(first.stdout.read_text())["steps"] == 2 and second.stdout.read_text() == ""


@pytest.mark.slow
def test_a_signal_to_one_host_ends_both_with_the_code_of_preemption(tmp_path: Path):
    port, run = free_port(), tmp_path / "run"
    job = Path(__file__).parents[3] / "examples" / "01_digits.py"
    commands = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "paceline",
                "train",
                str(job),
                "--steps",
                "100000",
                "--plan",
                "data=2",
                "--run",
                str(run),
            ],
            env={**os.environ, **of_kubeflow(index, port)},
        )
        for index in range(2)
    ]
    begun_s = time.monotonic()
    while not (run / "metrics.jsonl").exists() and time.monotonic() < begun_s + 150:
        time.sleep(0.2)
    commands[0].send_signal(signal.SIGTERM)
    assert [command.wait(timeout=80) for command in commands] == [5, 5]
    assert json.loads((run / "summary.json").read_text())["failure"]["reason"] == "preempted"


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["Kubeflow", "SkyPilot"])
def test_the_same_command_on_two_hosts_trains_as_one(tmp_path: Path, cluster: str):
    """Two commands on this host, each as one of two hosts, give the weights of one device."""
    port = free_port()
    given = {
        "Kubeflow": lambda index: of_kubeflow(index, port),
        "SkyPilot": lambda index: {
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
            "SKYPILOT_NODE_RANK": str(index),
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        },
    }[cluster]
    job = Path(__file__).parents[3] / "examples" / "01_digits.py"
    train = [sys.executable, "-m", "paceline", "train", str(job), "--steps", "8"]
    commands = [
        subprocess.Popen(
            [*train, "--run", str(tmp_path / "two"), "--plan", "data=2"],
            env={**os.environ, **given(index)},
        )
        for index in range(2)
    ]
    assert [command.wait(timeout=200) for command in commands] == [0, 0]
    subprocess.run(
        [*train, "--run", str(tmp_path / "one"), "--plan", "single"], check=True, timeout=100
    )
    on_one_host, on_two_hosts = (
        load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")
    )
    assert (
        max(float((on_one_host[name] - on_two_hosts[name]).abs().max()) for name in on_one_host)
        < 1e-5
    )
    assert json.loads((tmp_path / "two" / "plan.json").read_text())["world_size"] == 2
