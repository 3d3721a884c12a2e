"""Ranks that meet at a launcher's address: what is said when they can't."""

from __future__ import annotations

import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conditions import until

from paceline.base.errors import ClusterError, PeerLost
from paceline.cluster.devices import Device
from paceline.launch.hosts import launcher_rank
from paceline.launch.hosts.environment import Environment
from paceline.launch.hosts.launcher_rank import JoinedRank, agree, join, run_joined
from paceline.launch.process import host_context
from paceline.launch.process.context import RankContext
from paceline.launch.process.failure import Failure, RankFailed, failure_of
from paceline.launch.process.heartbeats import Heartbeat, HeartbeatTable


def _environment(port: int, *, launcher: str = "torchrun", rank: int = 0) -> Environment:
    return Environment(launcher, rank, 2, rank, 2, "127.0.0.1", port)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which something listens that knows nothing of ranks and hangs up on whoever comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """As torchrun sets them."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(taken))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "Slurm"])
def test_a_port_in_use(launcher: str, taken: int):
    """Rank 0 says which, and what to set."""
    with pytest.raises(
        ClusterError,
        match=rf"MASTER_PORT={taken}, where the ranks meet, is in use(.|\n)*hint: MASTER",
    ):
        join(_environment(taken, launcher=launcher), timeout_s=2)


@pytest.mark.slow
def test_nobody_is_there():
    """A rank that finds nobody says where it looked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        PeerLost, match=rf"rank 1 can't meet the 2 ranks of this run at 127.0.0.1:{port}"
    ):
        join(_environment(port, launcher="Slurm", rank=1), timeout_s=1)


@pytest.mark.slow
def test_others_do_not_come(monkeypatch: pytest.MonkeyPatch):
    """Rank 0 does not wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerLost, match="rank 0 can't meet the 2 ranks"):
        join(_environment(port, launcher="Slurm"), timeout_s=1)


def _agreed(make: Callable[[], str], *, timeout_s: float) -> str:
    """What rank 1 learns of what rank 0 makes."""
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(agree, store, _environment(1, rank=1), "key", make, timeout_s=timeout_s)
        agree(store, _environment(1), "key", make, timeout_s=timeout_s)
        return other.result()


@pytest.mark.slow
def test_rank_0_may_take_longer_than_a_rank_may_hang(monkeypatch: pytest.MonkeyPatch):
    """It gives signs of life meanwhile. The clock of who waits goes on where it looks, and in nobody's pause."""
    clock_s = 0.0

    def sleep(pause_s: float) -> None:
        nonlocal clock_s
        time.sleep(pause_s)
        clock_s += pause_s

    def make() -> str:
        until(lambda: clock_s > 1.8)
        return "made"

    monkeypatch.setattr(
        launcher_rank, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock_s)
    )

    assert _agreed(make, timeout_s=1.0) == "made"


def test_a_rank_0_that_gives_no_sign_is_lost():
    with pytest.raises(
        PeerLost, match=r"rank 1 has waited 0\.2 s for rank 0, which gave no sign of life"
    ):
        agree(dist.HashStore(), _environment(1, rank=1), "key", str, timeout_s=0.2)


def test_what_rank_0_refuses_ends_the_others():
    """They leave with the exit code of a refusal, and say nothing."""

    def make() -> str:
        raise ClusterError("refused")

    store = dist.HashStore()
    with pytest.raises(ClusterError, match="refused"):
        agree(store, _environment(1), "key", make, timeout_s=1)
    with pytest.raises(SystemExit) as left:
        agree(store, _environment(1, rank=1), "key", make, timeout_s=1)
    assert left.value.code == 2


@pytest.mark.parametrize("heard", [True, False])
def test_the_rank_that_failed_writes_why(heard: bool, monkeypatch: pytest.MonkeyPatch):
    """A rank on Ray that only heard may end after the command has written the cause."""
    reported, written = list[Failure](), list[RankFailed]()
    monkeypatch.setattr(host_context, "_this_rank", host_context.HostContext(reported.append))
    rank = JoinedRank(
        Environment("Ray", 0, 1, 0, 1, "127.0.0.1", 1),
        Device("cpu", 0, 2**30),
        store=dist.HashStore(),
        attempt=uuid.uuid4().hex,
        timeout_s=1.0,
        ended=written.append,
    )
    failure = failure_of(PeerLost("gone", heard=heard), rank=0, sign=Heartbeat(1, "reduce", 0.0))
    with pytest.raises(RankFailed):
        rank.end(failure, None)
    assert reported == [failure]
    assert bool(written) != heard


def test_a_rank_that_fails_tells_why_though_it_is_asked_to_end(monkeypatch: pytest.MonkeyPatch):
    """torchrun's agent ends the others as soon as one rank has died, before they have told which one."""
    asked: list[int] = []
    context = RankContext(0, 1, 1, torch.device("cpu"), None, HeartbeatTable(1), 0, "attempt")

    def failing(body: object, context: RankContext, *given: object, **also: object) -> object:
        with suppress(PeerLost), context.stoppable():
            raise PeerLost("rank 1 is gone")
        signal.raise_signal(signal.SIGTERM)
        return None, "why", None

    joined = SimpleNamespace(
        context=context, store=None, report_end=None, end=lambda *why: asked.extend(why)
    )
    monkeypatch.setattr(launcher_rank, "run_rank", failing)
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        run_joined(lambda context: None, joined, SimpleNamespace(), run_dir=None)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == ["why", None]
