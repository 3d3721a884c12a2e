"""A rank of torchrun or Slurm knows its place; contradictions are refused before anyone joins."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline import train
from paceline.base.errors import ClusterError, PlanError, UsageError
from paceline.launch.hosts import environment
from paceline.launch.hosts.environment import Environment, current, interface_towards
from paceline.launch.local.launcher import Launcher
from paceline.planner.resolve import resolve

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu03",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "123",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
}


def test_by_hand():
    """A process that nothing launched runs its own ranks."""
    assert current({}) is None
    assert (
        current({"PATH": "/bin", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}) is None
    )  # inside sbatch, without srun
    assert current({**SLURM, "SLURM_NTASKS": "1"}) is None  # an interactive shell of one task


@pytest.mark.parametrize("launched", [TORCHRUN, SLURM])
def test_encryption_that_is_gone(launched: dict[str, str]):
    """Who asks for it is told, and never trains without it unaware."""
    with pytest.raises(UsageError, match="PACELINE_TLS=1: Paceline encrypts nothing") as raised:
        current({**launched, "PACELINE_TLS": "1"})
    assert "WireGuard" in str(raised.value)
    assert current({**launched, "PACELINE_TLS": "0"}) == current(launched)
    assert current({"PACELINE_TLS": "1"}) is None  # nothing leaves this machine


def test_torchrun_is_told_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It prints the message below the tracebacks of all ranks."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(UsageError):
        train("no_such_job.py")
    failure = ProcessFailure(0, 1, 1, str(tmp_path / "error.json"))
    assert failure.message.startswith("there is no file no_such_job.py") and failure.timestamp


def test_torchrun():
    """torchrun's variables are taken as they are."""
    assert current(TORCHRUN) == Environment("torchrun", 5, 8, 1, 4, "gpu03", 29500)


def test_one_rank_a_host_is_assumed():
    """A launcher that sets no local numbers starts one rank a host."""
    given = {name: value for name, value in TORCHRUN.items() if not name.startswith("LOCAL")}
    detected = current(given)
    assert detected is not None
    assert (detected.local_rank, detected.local_world_size) == (0, 1)


def test_slurm():
    """Slurm's are read from its lists: the seventh of seven tasks, alone on the fourth host."""
    detected = current(SLURM)
    assert detected == Environment("Slurm", 6, 7, 0, 1, "gpu03", 20000 + 123 * 7 % 20000)
    assert (
        current(
            {**SLURM, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
        ).local_world_size
        == 2
    )


def test_slurm_steps_of_one_job_meet_at_different_ports():
    """Two steps of a job, and the jobs beside it, don't meet at one port."""
    given = [
        {**SLURM, "SLURM_STEP_ID": str(step), "SLURM_JOB_ID": str(job)}
        for job in (123, 124)
        for step in (0, 1)
    ]
    assert len({current(each).master_port for each in given}) == 4


def test_the_user_may_name_the_meeting_place():
    """MASTER_ADDR and MASTER_PORT win over what is derived."""
    detected = current({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "4000"})
    assert (detected.master_address, detected.master_port) == ("head", 4000)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu03", "gpu03"),
        ("a,b", "a"),
        ("gpu[03-05,9]", "gpu03"),
        ("gpu[7,9]", "gpu7"),
        ("rack[1-2]-gpu[03-05],x", "rack1-gpu03"),
        ("node-a.example.org,node-b[1-2]", "node-a.example.org"),
        ("n[001]-ib,n2", "n001-ib"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str):
    """Slurm's list is read without Slurm's tools."""
    assert current({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_address == first


def test_an_error_that_torchrun_can_t_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The error itself is raised."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no folder" / "error.json"))
    with pytest.raises(ClusterError, match="no ranks"), environment.told_to_torchrun():
        raise ClusterError("no ranks")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"MASTER_ADDR": None, "MASTER_PORT": None},
            r"MASTER_ADDR, MASTER_PORT is not(?s:.*)unset RANK",
        ),
        (
            {"RANK": "8"},
            r"torchrun says this is rank 8 of 8, 1 of 4 on its host, which contradicts itself",
        ),
        ({"LOCAL_RANK": "4"}, r"rank 5 of 8, 4 of 4 on its host"),
        ({"LOCAL_WORLD_SIZE": "9"}, r"1 of 9 on its host"),
        ({"WORLD_SIZE": "two"}, r"WORLD_SIZE=two is not a whole number"),
        ({"RANK": "-1"}, r"RANK=-1 is not a whole number"),
    ],
)
def test_a_contradiction_of_torchrun(change: dict[str, str | None], words: str):
    """Variables that are missing, no numbers, or out of range are refused with their names."""
    given = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ClusterError, match=words):
        current(given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_PROCID": None}, "SLURM_PROCID is not set"),
        ({"SLURM_PROCID": "7"}, "Slurm says this is rank 7 of 7"),
        (
            {"SLURM_STEP_NODELIST": ""},
            "can't read the first host of Slurm's node list ''(?s:.*)hint: set MASTER_ADDR",
        ),
    ],
)
def test_a_contradiction_of_slurm(change: dict[str, str | None], words: str):
    """The same for Slurm."""
    given = {name: value for name, value in {**SLURM, **change}.items() if value is not None}
    with pytest.raises(ClusterError, match=words):
        current(given)


class Small:
    num_samples, batch, precision, own_step, parts = 100, 100, "float32", None, ()


@pytest.mark.parametrize(
    ("plan", "options", "words"),
    [
        ("data=4", {}, r"plan 'data=4' needs 4 ranks and torchrun started 8"),
        ("data=8", {"procs": 4}, r"plan 'data=8' needs 8 ranks and --procs says 4"),
        (
            "pipeline=3 data=2 tensor=2",
            {},
            r"plan 'pipeline=3 data=2 tensor=2' needs 12 ranks and torchrun started 8",
        ),
        (
            "data=8",
            {"devices": "cpu:0,cpu:1"},
            r"plan 'data=8' needs 4 devices here and --devices names 2",
        ),
    ],
)
def test_counts_are_checked_before_joining(plan: str, options: dict[str, Any], words: str):
    """A plan that contradicts the launcher is refused by every rank by itself, so none waits for others."""
    with pytest.raises(PlanError, match=words):
        resolve(Small(), plan, environment=current(TORCHRUN), **options)  # type: ignore[arg-type]


def test_a_plan_that_agrees_with_the_launcher():
    """The devices are those of this host alone, and the default plan is as wide as the launcher's world."""
    for plan in ("data=8", None):
        resolved = resolve(Small(), plan, environment=current(TORCHRUN))  # type: ignore[arg-type]
        assert str(resolved.plan) == "data=8"
        assert len(resolved.cluster.devices) == 4


def test_the_interface_towards_an_address():
    """The loopback address is reached by the loopback interface; an address that can't be read by none."""
    name = interface_towards("127.0.0.1")
    assert any(
        interface_address.address == "127.0.0.1" and interface_address.family == socket.AF_INET
        for interface_address in psutil.net_if_addrs()[str(name)]
    )
    assert interface_towards("no host") is None


def test_a_launcher_starts_its_ranks_itself():
    """Restarts are its business: said before any rank is met."""
    place = Launcher(Environment("torchrun", 0, 2, 0, 2, "127.0.0.1", 1), [], timeout_s=1.0)
    with pytest.raises(
        UsageError, match=r"restarts=2: torchrun started this rank(?s:.*)--max-restarts"
    ):
        place.run(lambda context: None, run_dir=None, restarts=2)
