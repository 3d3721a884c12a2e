"""The same command line everywhere: its weights are those of this machine alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_slurm import submit, wait_for

from paceline.api.launch_files import LaunchRequest
from tests.namespaces import NetworkHost

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]  # Ray's own
DIGITS = Path(__file__).parents[2] / "examples" / "01_digits.py"
PACELINE = [sys.executable, "-P", "-m", "paceline"]
# Recorded of Kubeflow Trainer v2 and SkyPilot; addresses are those of the hosts here.
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_PORT": "29400",
    "PET_MASTER_ADDR": "10.78.0.1",
}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.78.0.1\n10.78.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
    "SKYPILOT_TASK_ID": "sky-2026-11-25_digits-1",
}
SSH = {"PET_NNODES": "2", "PET_MASTER_ADDR": "10.78.0.1", "PET_MASTER_PORT": "29500"}


def command(run: Path) -> list[str]:
    """What follows `paceline`, alike everywhere."""
    return [
        "train",
        str(DIGITS),
        "--plan",
        "data=2",
        "--steps",
        "60",
        "--set",
        "width=8",
        "--run",
        str(run),
    ]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, torch.Tensor]:
    """The weights of two ranks that are forks here, one thread each."""
    run = tmp_path_factory.mktemp("here") / "run"
    subprocess.run(
        [*PACELINE, *command(run)], env=environment(), check=True, capture_output=True, timeout=300
    )
    return load_file(run / "model.safetensors")


def environment(**more: str) -> dict[str, str]:
    launchers = ("GLOO", "MASTER", "RANK", "WORLD")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def run_all(*commands: tuple[Sequence[str], Mapping[str, str]]) -> None:
    """Run commands at a time; all must end well."""
    started = [
        subprocess.Popen(
            words, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for words, environ in commands
    ]
    try:
        printed = [process.communicate(timeout=400)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(printed)


def check(run: Path, expected: Mapping[str, torch.Tensor]) -> None:
    weights = load_file(run / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_torchrun(tmp_path: Path, expected: Any):
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--no-python",
        "--",
    ]
    run_all(([*agent, *PACELINE, *command(tmp_path / "run")], environment()))
    check(tmp_path / "run", expected)


@pytest.mark.root
def test_slurm(slurm: Mapping[str, str], tmp_path: Path, expected: Any):
    number = submit(
        {**slurm, "OMP_NUM_THREADS": "1"}, tmp_path, LaunchRequest(command(tmp_path / "run"))
    )
    wait_for(slurm, number, tmp_path, states={"COMPLETED"}, timeout_s=400)
    check(tmp_path / "run", expected)


def test_ray(ray_cluster: Any, tmp_path: Path, expected: Any):
    run_all(
        (
            [*PACELINE, *command(tmp_path / "run"), "--on", f"ray:{ray_cluster.address}"],
            environment(),
        )
    )
    check(tmp_path / "run", expected)


@pytest.mark.root
@pytest.mark.parametrize(
    ("place", "number"),
    [(KUBEFLOW, "PET_NODE_RANK"), (SKYPILOT, "SKYPILOT_NODE_RANK"), (SSH, "PET_NODE_RANK")],
    ids=["Kubeflow", "SkyPilot", "SSH"],
)
def test_hosts(
    hosts: Sequence[NetworkHost],
    place: Mapping[str, str],
    number: str,
    tmp_path: Path,
    expected: Any,
):
    """Two hosts that are told their places as the cluster tells them, or by hand."""
    run_all(
        *(
            (
                ["ip", "netns", "exec", host.name, *PACELINE, *command(tmp_path / "run")],
                environment(**place, **{number: str(index)}),
            )
            for index, host in enumerate(hosts)
        )
    )
    check(tmp_path / "run", expected)
