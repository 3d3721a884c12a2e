"""Ranks that a launcher started hear at once of one that dies, also where no collective tells them."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conditions import until

from paceline.base.errors import OutOfMemory, PeerLost, Preempted
from paceline.cluster.cluster import Cluster
from paceline.launch.hosts import launcher_rank, liveness
from paceline.launch.hosts.environment import Environment
from paceline.launch.hosts.liveness import Hub, Spoke
from paceline.launch.process import outside_watch, watchdog

SECRET = b"the secret of a run"


# --- The connections ----------------------------------------------------------------------------------------------


@pytest.fixture
def hub() -> Iterator[Hub]:
    opened = Hub("127.0.0.1", secret=SECRET)
    yield opened
    with suppress(OSError):
        opened.close(farewell=True)


@pytest.fixture
def join(hub: Hub) -> Iterator[Callable[[int], Spoke]]:
    """Spokes of ranks, once the hub knows them."""
    spokes: list[Spoke] = []

    def joined(rank: int) -> Spoke:
        spokes.append(Spoke(rank, ("127.0.0.1", hub.port), secret=SECRET))
        until(lambda: rank in hub._members)
        return spokes[-1]

    yield joined
    for spoke in spokes:
        spoke.close(farewell=True)


def test_all_hear_of_a_rank_that_ends_without_a_farewell(hub: Hub, join: Any):
    first, second, third = map(join, (1, 2, 3))
    second.close(farewell=False)
    until(lambda: hub.lost == first.lost == third.lost == [2])


def test_who_joins_later_hears_of_it_too(hub: Hub, join: Any):
    join(1).close(farewell=False)
    until(lambda: hub.lost == [1])
    late = join(2)
    until(lambda: late.lost == [1])


def test_a_rank_that_is_done_is_not_lost(hub: Hub, join: Any):
    first, second = map(join, (1, 2))
    second.close(farewell=True)
    until(lambda: 2 not in hub._members)
    hub.close(farewell=True)
    first._thread.join()
    assert hub.lost == first.lost == []


def test_rank_0_is_lost(hub: Hub, join: Any):
    first = join(1)
    hub.close(farewell=False)
    until(lambda: first.lost == [0])


# --- Ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def start_ranks(start_child: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`start_ranks(n, body)` runs `body(context)` as n ranks of a Slurm step, processes that nobody looks after."""
    for module, name in (
        (watchdog, "ANSWER_S"),
        (watchdog, "STORE_S"),
        (outside_watch, "ANSWER_S"),
        (outside_watch, "STORE_S"),
        (launcher_rank, "_HEARD_S"),
        (launcher_rank, "_LEAVE_S"),
    ):
        monkeypatch.setattr(module, name, 1.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    device = Cluster.local("cpu:0").devices[0]

    def start(count: int, body: Callable[[Any], Any], *, timeout_s: float = 600.0) -> list[Any]:
        def rank(number: int) -> None:
            environment = Environment("Slurm", number, count, number, count, "127.0.0.1", port)
            store = launcher_rank.join(environment, timeout_s=200)
            joined = launcher_rank.JoinedRank(
                environment, device, store=store, attempt="first", timeout_s=timeout_s
            )
            launcher_rank.run_joined(body, joined, device, run_dir=None)

        return [start_child(lambda number=number: rank(number)) for number in range(count)]

    return start


def in_a_collective_of_nccl() -> None:
    """The main thread is in C and comes back from nothing that happens to other ranks."""
    while True:
        ctypes.CDLL(None).pause()  # which a signal ends


def body_of(misbehave: dict[int, Callable[[], Any]]) -> Callable[[Any], None]:
    """Two steps with gloo, in the third of which these ranks misbehave while the others wait as NCCL lets them."""

    def body(context: Any) -> None:
        for context.step in (1, 2):
            context.beat("reduce")
            dist.all_reduce(torch.ones(1))
        context.step = 3
        context.beat("reduce")
        misbehave.get(context.rank, in_a_collective_of_nccl)()

    return body


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("culprit", [0, 2])
def test_others_end_when_a_rank_is_killed(start_ranks: Any, culprit: int):
    """Long before the timeout, with the exit code of a lost peer and its name. Rank 0 takes the store with it."""
    ranks = start_ranks(3, body_of({culprit: die}), timeout_s=600.0)
    codes = [rank.exit_code() for rank in ranks]
    assert codes == [
        -signal.SIGKILL if number == culprit else PeerLost.exit_code for number in range(3)
    ]
    stderr_text = "".join(rank.stderr for rank in ranks)
    assert re.search(
        rf"rank {culprit} on .* failed in step 3 \(reduce\):\n"
        rf"rank {culprit} is gone: its process or its host ended while rank \d was in step 3 \(reduce\)",
        stderr_text,
    )


def hang_together(misbehave: Callable[[], Any], culprit: int) -> Callable[[Any], None]:
    """A body in whose third step a rank misbehaves, and all are watched with a short patience from there on."""

    def body(context: Any) -> None:
        dist.barrier()
        context.step = 3
        context.beat("input" if context.rank == culprit else "reduce")
        context.watch.patience_s = 3.0
        (misbehave if context.rank == culprit else in_a_collective_of_nccl)()

    return body


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 2])
def test_others_end_when_a_rank_is_stopped(start_ranks: Any, culprit: int):
    """After the timeout: it might go on before. Another rank looks, whichever is stopped."""
    ranks = start_ranks(3, hang_together(stop, culprit), timeout_s=600.0)
    others = [rank for number, rank in enumerate(ranks) if number != culprit]
    assert [rank.exit_code() for rank in others] == [PeerLost.exit_code] * 2
    told = "".join(rank.stderr for rank in others)
    assert f"rank {culprit} gave no sign of life for 3 s (its process is stopped" in told


def hold_the_interpreter() -> None:
    reading, _ = os.pipe()
    ctypes.PyDLL("libc.so.6").read(reading, ctypes.create_string_buffer(1), 1)


@pytest.mark.sweep(1)
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: calls glibc")
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_holds_the_interpreter_is_named(start_ranks: Any, culprit: int):
    """None of its threads can speak; another rank of the host, when it has its turn, tells its line."""
    ranks = start_ranks(2, hang_together(hold_the_interpreter, culprit), timeout_s=600.0)
    other = ranks[1 - culprit]
    assert other.exit_code() == PeerLost.exit_code
    place = f"{__file__}:{hold_the_interpreter.__code__.co_firstlineno + 2}"
    assert (
        f"rank {culprit} on {socket.gethostname()} failed in step 3 (input), at {place}"
        in other.stderr
    )


@pytest.mark.slow
def test_others_end_when_one_is_stopped_and_another_killed(start_ranks: Any):
    ranks = start_ranks(4, body_of({1: stop, 3: die}), timeout_s=600.0)
    assert [ranks[number].exit_code() for number in (0, 2)] == [PeerLost.exit_code] * 2
    assert "rank 3 is gone" in ranks[0].stderr + ranks[2].stderr


@pytest.mark.slow
def test_forks_of_a_rank_do_not_hide_its_death(start_ranks: Any, tmp_path: Path):
    """A loader's workers outlive their rank for some seconds, with all that they inherited."""

    def die_before_a_fork() -> None:
        if os.fork():
            die()
        (tmp_path / "fork").write_text(str(os.getpid()))
        time.sleep(1000)
        os._exit(0)

    ranks = start_ranks(3, body_of({2: die_before_a_fork}), timeout_s=600.0)
    try:
        assert [ranks[number].exit_code() for number in (0, 1)] == [PeerLost.exit_code] * 2
    finally:
        os.kill(int(until((tmp_path / "fork").read_text)), signal.SIGKILL)


def test_others_end_when_a_rank_fails(
    start_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It says why, and they need not: rank 0, which has the store, stays until the other one has looked there."""
    ask = launcher_rank._cause_elsewhere

    def ask_all(store: Any, environment: Environment, patience_s: float) -> bool:
        is_known = ask(store, environment, patience_s)
        if environment.rank == 0:
            until((tmp_path / "looked").exists)
        else:
            (tmp_path / "looked").touch()
        return is_known

    def fail() -> None:
        raise MemoryError("CUDA out of memory")

    monkeypatch.setattr(launcher_rank, "_cause_elsewhere", ask_all)
    monkeypatch.setattr(launcher_rank, "_HEARD_S", 100.0)

    ranks = start_ranks(3, body_of({1: fail}), timeout_s=600.0)
    assert ranks[1].exit_code() == OutOfMemory.exit_code
    assert [ranks[number].exit_code() for number in (0, 2)] == [PeerLost.exit_code] * 2
    assert "out of memory" in ranks[1].stderr and not ranks[0].stderr and not ranks[2].stderr


@pytest.mark.slow
def test_who_leaves_as_it_should_ends_nobody(start_ranks: Any, tmp_path: Path):
    """One is done and one was asked to stop; the others have still something to write."""

    def write() -> None:
        until((tmp_path / "left").exists)
        time.sleep(2.5)  # longer than a rank that hears of a death needs to end

    def be_asked_to_stop() -> None:
        raise Preempted("asked to stop")

    ranks = start_ranks(3, body_of({0: write, 1: be_asked_to_stop, 2: lambda: None}))
    assert [rank.exit_code() for rank in ranks[1:]] == [Preempted.exit_code, 0], ranks[1].stderr
    (tmp_path / "left").touch()
    assert ranks[0].exit_code() == 0


def test_a_hub_that_can_not_be_reached_is_told(start_ranks: Any, monkeypatch: pytest.MonkeyPatch):
    """The run goes on, and notices deaths later."""

    def refuse(*args: Any, **options: Any) -> None:
        raise ConnectionRefusedError("no")

    monkeypatch.setattr(launcher_rank, "Spoke", refuse)
    ranks = start_ranks(2, body_of({0: lambda: None, 1: lambda: None}))
    assert [rank.exit_code() for rank in ranks] == [0, 0]
    assert (
        "rank 1 can't reach rank 0" in ranks[1].stderr
        and "after --timeout 600 s" in ranks[1].stderr
    )


@pytest.mark.parametrize("patience_s", [1.0, 2.0, 4.0, 5.0, 9.0, 10.0, 37.5, 60.0, 300.0])
def test_a_dead_host_is_given_up(patience_s: float):
    """Its kernel is asked for signs of life, and within the patience."""
    if not hasattr(socket, "TCP_KEEPCNT"):
        pytest.skip("needs a system with TCP_KEEPCNT, such as Linux")
    with socket.socket() as sock:
        liveness._watch_host(sock, liveness.silence_s(patience_s))
        idle, interval, count = (
            sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        assert abs(idle + interval * count - min(60, max(2, patience_s))) <= 1.5, (
            idle,
            interval,
            count,
        )
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_silent_host_is_told_apart_from_a_process_that_ended(hub: Hub, join: Any):
    join(1)._sock.shutdown(socket.SHUT_RDWR)
    until(lambda: hub.lost == [1])
    assert hub.unreachable == []
    assert [
        liveness._is_silence(error)
        for error in (ConnectionResetError(), TimeoutError(), OSError(113, "No route to host"))
    ] == [False, True, True]


JOB = """
import os, signal, torch, paceline as pl
from torch.utils.data import TensorDataset

def job(dies: int = -1):
    calls = []
    def loss(output, target):
        calls.append(None)
        if len(calls) == 20 and int(os.environ["SLURM_PROCID"]) == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.mse_loss(output, target)
    return pl.Job(model=lambda: torch.nn.Linear(4, 4), data=TensorDataset(torch.zeros(48, 4), torch.zeros(48, 4)),
                  loss=loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), batch=12, epochs=10)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dies", [-1, 0, 2])
def test_runs_of_users_in_slurm(tmp_path: Path, dies: int):
    """`paceline train` as srun starts it, over gloo, where a rank is killed in the middle of training, or none is."""
    (tmp_path / "job.py").write_text(JOB)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        str(tmp_path / "job.py"),
        "--plan",
        "data=3",
        "--run",
        str(tmp_path / "run"),
        "--check",
        "no",
        "--set",
        f"dies={dies}",
    ]
    ranks = [
        subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **slurm,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(3)
    ]
    stderr_texts = [rank.communicate(timeout=200)[1] for rank in ranks]
    good = 0 if dies < 0 else PeerLost.exit_code
    assert [rank.returncode for rank in ranks] == [
        -signal.SIGKILL if rank == dies else good for rank in range(3)
    ], stderr_texts
    assert dies < 0 or f"rank {dies} is gone" in "".join(stderr_texts)
