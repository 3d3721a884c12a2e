"""doctor looks at the machine, says what is wrong, and what to do about it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from conditions import until

from paceline.cluster.accelerators import Unusable
from paceline.doctor import gpus, machine
from paceline.doctor.machine import Finding, examine

Usage = namedtuple("Usage", ["total", "used", "free"])
LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_STEP_ID",
)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def finding(name: str) -> Finding:
    return machine._guarded(name, machine._CHECKS[name])


def test_this_machine_can_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Everything is examined once and nothing is bad where the tests run: two real processes all-reduce, undisturbed
    by a torch.py in the working folder."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('the wrong torch')")
    monkeypatch.chdir(tmp_path)
    findings = {check.name: check for check in examine()}
    assert list(findings) == list(machine._CHECKS)
    assert [check for check in findings.values() if check.status == "bad"] == []
    assert (
        "us a small all-reduce" in findings["gloo"].detail
        and "GB/s for 16 MiB" in findings["gloo"].detail
    )
    assert all(check.fix for check in findings.values() if check.status != "ok")


def test_a_check_that_fails_is_a_finding():
    """One broken check doesn't hide the others."""

    def check() -> Any:
        raise PermissionError("not for you")

    assert machine._guarded("memory", check) == Finding(
        "memory", "bad", "can't be examined: PermissionError: not for you"
    )


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.11.0", "ok"),
        ("2.13.0+cpu", "ok"),
        ("3.0.0a1", "ok"),
        ("2.9.1", "bad"),
        ("1.13", "bad"),
        (None, "bad"),
    ],
)
def test_torch_has_a_lowest_version(
    monkeypatch: pytest.MonkeyPatch, version: str | None, status: str
):
    """An old or missing torch is bad, with the command that installs it; 2.9 is older than 2.11."""
    monkeypatch.setattr(machine, "_version", lambda _: version)
    check = finding("torch")
    assert check.status == status
    assert (check.fix is not None and 'pip install "torch>=2.11"' in check.fix) == (status == "bad")


@pytest.mark.parametrize(
    ("threads", "status"),
    [(None, "ok"), ("2", "ok"), ("4", "ok"), ("64", "warn"), ("two", "bad"), ("0", "bad")],
)
def test_threads_are_compared_with_cores(
    monkeypatch: pytest.MonkeyPatch, threads: str | None, status: str
):
    """More threads than cores slow ranks down; what isn't a number breaks OpenMP."""
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert finding("cores").status == status


def test_a_container_limits_memory(monkeypatch: pytest.MonkeyPatch):
    """The limit is shown beside the machine's memory, and too little of it is a warning."""
    monkeypatch.setattr(machine, "usable_memory_bytes", lambda: 2**30)
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 2**28)
    check = finding("memory")
    assert check.status == "warn" and check.detail.startswith("1.0 GiB, limited by a cgroup from")


@pytest.mark.parametrize(("total", "status"), [(64 * 2**20, "warn"), (2**30, "ok")])
def test_small_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, total: int, status: str):
    """Docker's 64 MiB of /dev/shm are too few for loader workers."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("needs Linux's /dev/shm")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total, 0, total))
    check = finding("shared memory")
    assert check.status == status
    assert (check.fix is None) == (status == "ok")


@pytest.mark.parametrize(
    ("limits", "status", "fix"),
    [
        ((256, 4096), "warn", "ulimit -n 4096"),
        ((1024, 4096), "ok", None),
        ((256, resource.RLIM_INFINITY), "warn", "ulimit -n 65536"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", None),
    ],
)
def test_few_open_files_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], status: str, fix: str | None
):
    """The fix stays within the hard limit."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    assert (finding("open files").status, finding("open files").fix) == (status, fix)


def test_a_folder_that_can_not_be_written_is_bad(monkeypatch: pytest.MonkeyPatch):
    """Runs are written into the working folder."""

    def refuse(dir: Path) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", refuse)
    check = finding("disk")
    assert check.status == "bad" and "can't be written: Read-only file system" in check.detail


def test_a_nearly_full_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    """Checkpoints need room."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 0, 2**20))
    assert finding("disk").status == "warn"


# --- GPUs -------------------------------------------------------------------------------------------------------


def test_a_gpu_that_torch_can_not_use_is_bad(monkeypatch: pytest.MonkeyPatch):
    """A GPU that would be left idle is not overlooked."""
    monkeypatch.setattr(
        gpus, "unusable", lambda: Unusable("a driver, and no build for it", "install one")
    )
    check = finding("GPUs")
    assert (check.status, check.detail, check.fix) == (
        "bad",
        "a driver, and no build for it",
        "install one",
    )


def test_gpus_need_nccl(monkeypatch: pytest.MonkeyPatch):
    """GPUs without NCCL can't talk to each other."""
    import torch

    monkeypatch.setattr(machine, "has_gpus", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert finding("NCCL").status == "bad"


# --- Ranks and hosts --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_that_hang_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The probe gives up at its deadline and leaves no process behind."""

    def work(context: Any) -> None:
        (tmp_path / str(context.rank)).write_text(str(os.getpid()))
        if context.rank:
            dist.barrier()
        time.sleep(1000)

    monkeypatch.setattr(machine, "PROBE_TIMEOUT_S", 2.0)
    monkeypatch.setattr(machine, "probe", work)
    check = finding("gloo")
    assert check.status == "bad" and "rank 0 did not reach the collective" in check.detail
    until(lambda: not psutil.pid_exists(int((tmp_path / "0").read_text())))


def test_ranks_that_fail_show_why(monkeypatch: pytest.MonkeyPatch):
    """The error of a failing rank is the finding, or how it ended without one."""

    def refuse(context: Any) -> None:
        if context.rank:
            raise OSError("Connection refused")

    monkeypatch.setattr(machine, "probe", refuse)
    check = finding("gloo")
    assert (check.status, check.detail) == (
        "bad",
        "two processes could not all-reduce: OSError: Connection refused",
    )
    monkeypatch.setattr(machine, "probe", lambda context: os.kill(os.getpid(), signal.SIGKILL))
    assert finding("gloo").detail == "two processes could not all-reduce: it was killed by SIGKILL"


def _host(monkeypatch: pytest.MonkeyPatch, address: str | None, interfaces: dict[str, str]) -> None:
    def resolve(_: str) -> str:
        if address is None:
            raise socket.gaierror("unknown name")
        return address

    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(
        machine,
        "_interfaces",
        lambda: {name: [interface] for name, interface in interfaces.items()},
    )


BOTH = {"lo": "127.0.0.1", "eth0": "10.0.0.7"}


@pytest.mark.parametrize(
    ("address", "interfaces", "status"),
    [
        ("10.0.0.7", BOTH, "ok"),
        ("127.0.1.1", BOTH, "warn"),
        (None, BOTH, "warn"),
        ("127.0.0.1", {"lo": "127.0.0.1"}, "ok"),
    ],
)
def test_a_host_name_that_means_loopback_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, address: str | None, interfaces: dict[str, str], status: str
):
    """Other hosts can't reach it there; with no other interface there is nothing to reach."""
    _host(monkeypatch, address, interfaces)
    check = finding("host name")
    assert check.status == status
    assert (check.fix or "").endswith("GLOO_SOCKET_IFNAME=eth0 on each") == (status == "warn")


@pytest.mark.parametrize(("chosen", "status"), [("eth0", "ok"), ("eth0,lo", "ok"), ("ib0", "bad")])
def test_the_chosen_interface_must_exist(monkeypatch: pytest.MonkeyPatch, chosen: str, status: str):
    """A misspelled GLOO_SOCKET_IFNAME is named, with the interfaces there are."""
    _host(monkeypatch, "127.0.0.1", BOTH)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    check = finding("host name")
    assert check.status == status and "lo 127.0.0.1, eth0 10.0.0.7" in check.detail


def test_interfaces_that_are_down_are_left_out(monkeypatch: pytest.MonkeyPatch):
    """Only what is up and has an IPv4 address counts."""
    Address, State = namedtuple("Address", "family address"), namedtuple("State", "isup")
    inet = [Address(socket.AF_INET, "10.0.0.7"), Address(socket.AF_INET6, "::1")]
    states = {"eth0": State(True), "eth1": State(False), "eth2": State(True)}
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: {"eth0": inet, "eth1": inet, "eth2": inet[1:]}
    )
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    assert machine._interfaces() == {"eth0": ["10.0.0.7"]}


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("variables", "status", "detail"),
    [
        ({}, "ok", "ranks are started as local processes"),
        (TORCHRUN, "ok", "rank 1 of 2, started by torchrun"),
        ({"RANK": "3"}, "warn", "RANK set, but no launcher is recognised"),
        ({**TORCHRUN, "RANK": "5"}, "bad", "rank 5 of 2"),
    ],
)
def test_the_launcher_is_recognised(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], status: str, detail: str
):
    """torchrun's variables are read; left-over or contradicting ones are found."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check = finding("launcher")
    assert check.status == status and detail in check.detail
    assert (check.fix is None) == (status == "ok")


def test_a_finding_is_json():
    """--json prints findings as they are."""
    assert json.loads(json.dumps(Finding("disk", "ok", "here").to_dict())) == {
        "name": "disk",
        "status": "ok",
        "detail": "here",
        "fix": None,
    }


def test_packages_that_are_not_installed_are_no_problem(monkeypatch: pytest.MonkeyPatch):
    """Optional packages are listed with their use."""
    monkeypatch.setattr(
        machine, "_version", lambda package: "1.9" if package == "scikit-learn" else None
    )
    check = finding("optional packages")
    assert check.status == "ok"
    assert "optuna not installed (search)" in check.detail
    assert "scikit-learn 1.9 (examples)" in check.detail
