"""`scripts/check-hosts`: processes that are hosts of this machine measure each other, and what reports show."""

from __future__ import annotations

import doctest
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import chain, permutations
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.errors import ClusterError, PeerLost
from paceline.base.secure import Acceptor
from paceline.base.sockets import listen

SCRIPT = Path(__file__).parents[2] / "scripts" / "check-hosts"


def loaded() -> ModuleType:
    """The script as a module, known by its name to the processes that a pool forks."""
    loader = SourceFileLoader("check_hosts", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = module_from_spec(spec)
    loader.exec_module(module)
    return module


check_hosts = loaded()
VERSIONS = {"paceline": "1", "torch": "2", "Python": "3"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def report(index: int, **changed: Any) -> Any:
    others = [other for other in range(3) if other != index]
    made = check_hosts.HostReport(
        index,
        f"n{index}",
        "10.0.0.1",
        "eth0",
        f"10.0.0.{index + 1}",
        "it faces 10.0.0.1",
        VERSIONS,
        tuple(check_hosts.PairLink(other, 1e-4, 1e9) for other in others),
    )
    return replace(made, **changed)


def statuses(*reports: Any, address: str = "10.0.0.1") -> dict[str, str]:
    return {
        each.name: each.status
        for each in check_hosts.findings_of(reports, check_hosts.HostPlace(0, 3, address, 1))
    }


def test_the_command_on_two_hosts():
    """The first host prints what both found, in text or as JSON."""
    port = free_port()
    place = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    hosts = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--timeout", "120", *options],
            env={**os.environ, **place, "PET_NODE_RANK": str(index)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index, options in enumerate(([], ["--json"]))
    ]
    first, second = (host.communicate(timeout=200)[0] for host in hosts)
    assert [host.returncode for host in hosts] == [0, 0]
    assert "0 to 1" in first and "1 to 0" in first and "versions" in first
    names = [finding["name"] for finding in json.loads(second)["findings"]]
    assert names == ["host 1", "1 to 0", "others"]


@pytest.mark.slow
def test_the_command_inside_torchrun():
    """The agent's store is where the processes meet, and torch complains of no second one."""
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), str(SCRIPT), "--timeout", "120"),
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    assert "0 to 1" in ran.stdout and "1 to 0" in ran.stdout
    assert "failed to bind" not in ran.stderr


def test_examples_in_its_docstrings():
    assert doctest.testmod(check_hosts).failed == 0


@given(st.integers(1, 12))
def test_each_host_meets_each_other_once_in_each_direction(num_hosts: int):
    """And no host is in two pairs of a round."""
    played = check_hosts.rounds(num_hosts)
    assert sorted(chain(*played)) == sorted(permutations(range(num_hosts), 2))
    assert all(len(set(chain(*pairs))) == 2 * len(pairs) for pairs in played)


def test_three_hosts_of_this_machine():
    """The first hears of all links, the others of their own."""
    port = free_port()
    # Not threads of one process: each host forks, and a fork has no threads, but what they have locked.
    with ProcessPoolExecutor(3, get_context("fork")) as hosts:
        futures = [
            hosts.submit(
                check_hosts.examine_hosts,
                check_hosts.HostPlace(index, 3, "127.0.0.1", port),
                timeout_s=120,
            )
            for index in range(3)
        ]
        findings_by_host = [each.result() for each in futures]
    assert [each.name for each in findings_by_host[0] if " to " in each.name] == [
        "0 to 2",
        "0 to 1",
        "1 to 2",
        "1 to 0",
        "2 to 1",
        "2 to 0",
    ]
    assert {each.name for each in findings_by_host[2]} == {"host 2", "2 to 1", "2 to 0", "others"}
    assert {each.status for each in findings_by_host[0]} <= {
        "ok",
        "warn",
    }  # a link of a busy machine may look slow


@pytest.mark.parametrize(
    ("second", "message"),
    [((1, 2), "another host is host 1 too"), ((1, 3), "of 3 hosts and another one of 2")],
)
def test_hosts_that_were_told_what_contradicts_itself(second: tuple[int, int], message: str):
    """A number that two hosts have, as where a command was copied, and different numbers of hosts."""
    import torch.distributed as dist

    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    store.set("number of hosts", "2")
    store.add("hosts 1", 1)
    with pytest.raises((ClusterError, PeerLost), match=message):
        check_hosts.examine_hosts(check_hosts.HostPlace(*second, "127.0.0.1", port), timeout_s=0.5)


def test_a_first_host_that_leaves_is_named(monkeypatch: pytest.MonkeyPatch):
    """As a host that is lost, and not as a fault of this program."""
    import torch.distributed as dist

    def leave(*_: object) -> bool:
        raise dist.DistNetworkError("Broken pipe")

    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(dist.TCPStore, "check", leave)
    with pytest.raises(PeerLost, match="host 0, where hosts meet, is gone: Broken pipe"):
        check_hosts.examine_hosts(check_hosts.HostPlace(1, 2, "127.0.0.1", port), timeout_s=0.5)
    del store


def test_a_host_that_does_not_come_is_named():
    with pytest.raises(PeerLost, match=r"nothing was heard of host 1 for 0\.2 s"):
        check_hosts.examine_hosts(
            check_hosts.HostPlace(0, 2, "127.0.0.1", free_port()), timeout_s=0.2
        )


def test_what_has_no_address_and_what_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    """Told with what to do."""
    [finding] = check_hosts.examine_hosts(
        check_hosts.HostPlace(1, 2, "nowhere.invalid", 1), timeout_s=1
    )
    assert (finding.name, finding.status) == ("name lookup", "bad")
    [finding] = check_hosts.examine_hosts(
        check_hosts.HostPlace(1, 2, "127.0.0.1", free_port()), timeout_s=0.5
    )
    assert (finding.name, finding.status) == ("meeting place", "bad")
    monkeypatch.setattr(check_hosts, "GIVE_UP_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        [finding] = check_hosts.examine_hosts(
            check_hosts.HostPlace(1, 2, "127.0.0.1", silent.getsockname()[1]), timeout_s=0.5
        )
    assert (finding.name, finding.status) == (
        "meeting place",
        "bad",
    ) and "doesn't answer" in finding.detail
    assert "Connection refused" in str(
        check_hosts.measured(1, "127.0.0.1", free_port(), "00" * 16).error
    )


def test_hosts_with_other_secrets_are_told():
    """The link is not measured, and its report says what to look at."""
    listener = listen("127.0.0.1")
    with closing(Acceptor(listener, check_hosts._answer, secret=b"another")) as acceptor:
        link = check_hosts.measured(1, *acceptor.address, "00" * 16)
    assert "PACELINE_SECRET must be equal on all hosts" in str(link.error)


def test_what_reports_show():
    """A slow link, one that is closed, versions that differ, and names that mean different hosts."""
    assert set(statuses(report(0), report(1), report(2)).values()) == {"ok"}
    slow = report(1, links=(check_hosts.PairLink(0, 1e-4, 1e8), check_hosts.PairLink(2, 1e-4, 1e9)))
    assert statuses(report(0), slow, report(2))["1 to 0"] == "warn"
    closed = report(
        1,
        links=(
            check_hosts.PairLink(0, error="Connection refused at 10.0.0.1:5"),
            check_hosts.PairLink(2, 1e-4, 1e9),
        ),
    )
    assert statuses(report(0), closed, report(2))["1 to 0"] == "bad"
    assert (
        statuses(report(0), report(1, versions={**VERSIONS, "torch": "1"}), report(2))["versions"]
        == "bad"
    )
    assert statuses(report(0), report(1, meets_at="10.0.0.9"), report(2))["name lookup"] == "warn"
    loopback = report(0, meets_at="127.0.1.1", address="127.0.0.1", interface="lo")
    assert statuses(loopback, report(1), report(2), address="n0")["name lookup"] == "bad"
    assert statuses(report(0, address=None), report(1), report(2))["host 0"] == "bad"


def test_a_report_travels_as_json():
    assert check_hosts.HostReport.decode(json.dumps(asdict(report(1)))) == report(1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "1",
                "PET_MASTER_ADDR": "a",
                "PET_MASTER_PORT": "29400",
            },
            check_hosts.HostPlace(1, 2, "a", 29400),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "b", "MASTER_PORT": "5"},
            check_hosts.HostPlace(1, 3, "b", 5),
        ),
    ],
)
def test_a_launcher_says_which_host_this_is(
    environ: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert check_hosts.place_here() == expected


def test_without_a_launcher_the_way_is_said():
    with pytest.raises(ClusterError, match="PET_NNODES"):
        check_hosts.place_here()
