"""How long ranks wait for each other: measured once, kept, and counted in every collective."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conditions import PATIENCE_S

from paceline.api import links
from paceline.api.links import with_links
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.cluster.links import LOOPBACK, Link, Network
from paceline.launch.process.failure import RankFailed, failure_of
from paceline.launch.process.heartbeats import Heartbeat
from paceline.model.cost import cache
from paceline.planner.problem import _with_links
from paceline.simulate.collectives import collective_s
from paceline.simulate.program import Collective

TWO, FOUR = Link(1e9, 1e-4, 2e-3), Link(5e8, 1e-4, 8e-3)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """An empty cache, and what is measured, without ranks."""
    counts: list[int] = []

    def measure(cluster: Cluster, num_ranks: int) -> Link:
        counts.append(num_ranks)
        return {2: TWO, 4: FOUR}.get(num_ranks, LOOPBACK)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(links, "measure_link", measure)
    return counts


def test_links_are_measured_once(measured: list[int]):
    linked = with_links(Cluster.local("cpu:0-3"))

    assert linked.links == ((2, TWO), (4, FOUR)) and measured == [2, 4]
    assert with_links(Cluster.local("cpu:0-3")) == linked and measured == [2, 4]
    assert [count for count, _ in with_links(Cluster.local("cpu:0-2")).links] == [
        2,
        3,
    ] and measured == [2, 4, 3]


def test_figures_of_a_busy_machine_are_not_kept(
    measured: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """They are better than none, and said to be rough; the next plan measures again, only what was not quiet."""
    monkeypatch.setattr(
        links,
        "measure_link",
        lambda _, num_ranks: replace(FOUR, source="measured" if num_ranks == 2 else links.BUSY),
    )
    assert with_links(Cluster.local("cpu:0-3")).links == ((2, FOUR), (4, FOUR))
    assert "it is measured again next time" in capsys.readouterr().err

    monkeypatch.setattr(
        links, "measure_link", lambda _, num_ranks: measured.append(num_ranks) or TWO
    )
    assert with_links(Cluster.local("cpu:0-3")).links == ((2, FOUR), (4, TWO)) and measured == [4]


def test_nothing_is_measured_where_ranks_are_at_work(measured: list[int]):
    assert (
        with_links(Cluster.local("cpu:0-3"), measure=False) == Cluster.local("cpu:0-3")
        and not measured
    )


@pytest.mark.parametrize("cluster", [Cluster.local("cpu:0"), Cluster.parse("8xH100")])
def test_one_device_and_described_ones_stay(cluster: Cluster, measured: list[int]):
    assert with_links(cluster) == cluster and not measured


@pytest.mark.parametrize(
    "damage",
    [
        {"2": {"bytes_per_s": 0, "latency_s": 1e-4}},
        {"2": {"bytes_per_s": 1e9, "latency_s": 1e-4, "late_s": -1}},
        {"2": {"bytes_per_s": 1e9}},
        {"2": {"bytes_per_s": 1e9, "latency_s": 1e-4, "wait_s": None}},
        {"2": [1e9, 1e-4, 0, 0]},
        [1],
    ],
)
def test_a_damaged_cache_is_measured_again(measured: list[int], damage: object):
    cache.write(links.CACHED, "cpu", damage)

    assert with_links(Cluster.local("cpu:0-1")).links == ((2, TWO),) and measured == [2]


def test_as_many_ranks_as_there_are_wait():
    cluster = replace(Cluster.local("cpu:0-3"), links=((2, TWO), (4, FOUR)))
    few, many = replace(cluster, devices=cluster.devices[:2]), Cluster.local("cpu:0-7")

    assert (cluster.link_of_all, few.link_of_all) == (FOUR, TWO)
    assert replace(many, links=cluster.links).link_of_all == FOUR and many.link_of_all == LOOPBACK


def test_a_collective_waits_once():
    """2 ms of waiting, 0.2 ms of latency and a byte's 1 ns: 1e6 bytes twice through half of a link."""
    assert collective_s(Collective("all_reduce", 1e6, group=2), Network(TWO)) == pytest.approx(
        2e-3 + 0.2e-3 + 1e-3
    )


def test_faster_links_carry_more_and_wait_as_long():
    changed = _with_links(replace(Cluster.local("cpu:0-1"), links=((2, TWO),)), 4)

    assert changed.links == ((2, replace(TWO, bytes_per_s=4e9)),)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few collectives are timed, and ranks may wait long for a core."""
    for name, value in (("SMALL", 4), ("LARGE", 2), ("ROUNDS", 1), ("TIMEOUT_S", PATIENCE_S)):
        monkeypatch.setattr(links, name, value)


@pytest.mark.sweep(1)
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("share", "source"), [(1.0, "measured"), (0.5, links.BUSY)])
def test_ranks_that_share_their_cores_with_other_work_say_so(
    monkeypatch: pytest.MonkeyPatch, share: float, source: str
):
    """A core's clock says which part of the time they had it."""
    clock = SimpleNamespace(
        perf_counter=time.perf_counter, thread_time=lambda: share * time.perf_counter()
    )
    monkeypatch.setattr(links, "time", clock)
    monkeypatch.setattr(links, "usable_cores", lambda: 2)
    link = links.measure_link(Cluster.local("cpu:0-1"), 2)

    assert link.bytes_per_s > 0 and link.wait_s >= 0 and link.source == source


def gpus(*indices: int) -> Cluster:
    return Cluster(
        tuple(Device("cuda", index, 80 << 30) for index in indices),
        replace(LOOPBACK, source="PCIe 4 x16, as the driver says"),
    )


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What measurements of GPUs depend on."""
    machine = {"is": "two H100"}
    monkeypatch.setattr(cache, "identity", lambda: machine["is"])
    return machine


def test_gpus_are_measured_once_for_each_choice_of_them(measured: list[int], wired: dict[str, str]):
    """And again where the machine is wired otherwise, or has another driver."""
    linked = with_links(gpus(0, 1, 2, 3))
    assert linked.links == ((2, TWO), (4, FOUR)) and measured == [2, 4]
    assert linked.link_of_all.source == "measured between 4 GPUs"
    assert with_links(gpus(0, 1)).link_of_all.source == "measured between 2 GPUs" and measured == [
        2,
        4,
    ]
    with_links(gpus(2, 3))
    assert measured == [2, 4, 2]
    wired["is"] = "two H100 with a bridge"
    with_links(gpus(0, 1))
    assert measured == [2, 4, 2, 2]


@pytest.mark.parametrize("cluster", [gpus(0), gpus(0, 0), gpus()])
def test_ranks_that_share_a_gpu_have_no_link_to_measure(
    cluster: Cluster, measured: list[int], wired: dict[str, str]
):
    assert with_links(cluster) == cluster and not measured


def test_gpus_that_can_not_be_measured_count_as_the_driver_says(
    measured: list[int],
    wired: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fail(cluster: Cluster, num_ranks: int) -> Link:
        raise RankFailed(
            failure_of(RuntimeError("NCCL error"), rank=1, sign=Heartbeat(0, "start", 0.0))
        )

    monkeypatch.setattr(links, "measure_link", fail)
    linked = with_links(gpus(0, 1))
    assert not linked.links and linked.link_of_all.source == "PCIe 4 x16, as the driver says"
    stderr_text = capsys.readouterr().err
    assert (
        "links between GPUs could not be measured" in stderr_text
        and "they count as PCIe 4 x16" in stderr_text
    )
