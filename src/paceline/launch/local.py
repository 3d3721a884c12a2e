"""Ranks as forked processes of this one: no port to collide on, and what was imported is paid for once."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paceline.cluster import Device
from paceline.errors import PeerLost
from paceline.launch import signals
from paceline.launch.failure import Failure, RankFailed, cause_of, killed, stopped
from paceline.launch.fault_policy import ALL_NEEDED, FaultPolicy
from paceline.launch.fork import die_with, end_openmp_threads, refuse_used_cuda
from paceline.launch.heartbeats import HeartbeatTable
from paceline.launch.process import Body, run_rank

_GRACE_S = 5.0  # after a first failure, for the other ranks to report and leave
_SPEAK_S = 5.0  # after the timeout, for a rank that hangs to say where


@dataclass
class _Rank:
    """A child process and what it said."""

    process: Any
    pipe: Connection
    result: Any = None
    failure: Failure | None = None
    log: Path | None = None
    finished: bool = field(default=False)


@dataclass
class _Launch:
    """What ranks are started with.

    attempt: names one start of all ranks. restarts: that are left. deaths: of each rank so far.
    """

    body: Body
    devices: Sequence[Device]
    board: HeartbeatTable
    name: str
    rendezvous: Path
    run_dir: Path | None
    timeout_s: float
    fault_policy: FaultPolicy
    secret: bytes
    restarts: int
    deaths: list[int]
    num_starts: int = 1

    @property
    def attempt(self) -> str:
        return f"{self.name}-{self.num_starts}"

    @property
    def store(self) -> Path:
        """Where the ranks of this start find each other: not what those before them have left."""
        return self.rendezvous / f"store-{self.num_starts}"


def run_local(body: Body, devices: Sequence[Device], *, run_dir: Path | None = None, timeout_s: float = 300.0,
              idle: Callable[[HeartbeatTable], None] | None = None, fault_policy: FaultPolicy = ALL_NEEDED,
              restarts: int = 0) -> list[Any]:
    """Run `body(context)` as one rank a device and return the results in rank order.

    Results travel as JSON. The ranks are forks, so the body may be any closure; nothing is pickled. Ctrl-C and
    SIGTERM are passed on to the ranks, which stop after their step; a second one, or a parent that dies, kills them.

    Args:
        run_dir: Where each rank's log goes; without it only rank 0 is heard.
        timeout_s: How long a rank may give no sign of life while others wait.
        idle: Called in another fork, at a low priority, after the ranks have started.
        fault_policy: Which ranks the others go on without; the result of one that was killed is None.
        restarts: How often ranks that died or hang are started again: such a one alone, or else all of them, with
            `context.num_starts` above 1. A rank that raised an error is not: it would again.

    Raises:
        RankFailed: with the report of the rank whose failure the others followed from.
        PacelineError: CUDA is already in use in this process, which forks can't share.
    """
    from paceline.launch.aside import run_beside  # which imports torch

    refuse_used_cuda()
    end_openmp_threads()
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="paceline-") as rendezvous, _forwarded_signals(ranks) as interrupted:
        launch = _Launch(body, devices, HeartbeatTable(len(devices)), uuid.uuid4().hex[:12], Path(rendezvous), run_dir,
                         timeout_s,
                         fault_policy, secrets.token_bytes(32), restarts, [0] * len(devices))
        try:
            with signals.held():
                _start_all(launch, ranks)
            with run_beside(idle, launch.board):
                _collect(launch, ranks, interrupted)
                while (cause := _cause(launch, ranks)) and _may_restart(launch, cause, interrupted):
                    _end(ranks, patience_s=0.0)
                    for number in {rank.failure.rank for rank in ranks if rank.failure and not rank.failure.heard}:
                        launch.deaths[number] += 1
                    launch.num_starts += 1
                    _tell_restart(launch, cause, "all ranks start again from the newest checkpoint")
                    ranks.clear()
                    with _forking(launch, ranks, interrupted):
                        _start_all(launch, ranks)
                    _collect(launch, ranks, interrupted)
                if cause is not None:
                    error = RankFailed(cause, ranks[cause.rank].log)
                    if interrupted and cause.is_stop and interrupted[0] == signal.SIGINT:
                        error.exit_code = 128 + signal.SIGINT
                    raise error
        finally:
            _end(ranks)
    return [rank.result for rank in ranks]


def _cause(launch: _Launch, ranks: Sequence[_Rank]) -> Failure | None:
    """What ended the run before its time."""
    failures = [rank.failure for rank in ranks if rank.failure and not _is_outlived(rank.failure, launch.fault_policy)]
    return cause_of(failures) if failures else None


def _may_restart(launch: _Launch, failure: Failure, interrupted: Sequence[int]) -> bool:
    """Whether who died, or hung, is to be started again."""
    return failure.kind == PeerLost.__name__ and launch.restarts > 0 and not interrupted


def _tell_restart(launch: _Launch, failure: Failure, what: str) -> None:
    """Count a restart and say why."""
    launch.restarts -= 1
    why = failure.message.partition("\n")[0]
    print(f"rank {failure.rank}: {why}; {what} ({launch.restarts} restart{'s' * (launch.restarts != 1)} left)",
          file=sys.stderr, flush=True)


@contextmanager
def _forking(launch: _Launch, ranks: Sequence[_Rank], interrupted: Sequence[int]) -> Iterator[None]:
    """Start ranks again. They hear of a signal that came just before."""
    with signals.held():
        yield
        if interrupted:
            for rank in ranks:
                rank.process.terminate()


def _is_outlived(failure: Failure, fault_policy: FaultPolicy) -> bool:
    """Whether a rank is merely gone, and the others go on without it. An error is an error on any rank."""
    return failure.rank in fault_policy.optional_ranks and failure.kind == PeerLost.__name__


def _start_all(launch: _Launch, ranks: list[_Rank]) -> None:
    for rank in range(len(launch.devices)):
        ranks.append(_start(launch, rank))  # one by one: whatever fails, those that run are known


def _start(launch: _Launch, rank: int) -> _Rank:
    launch.board.write(rank, 0, "start")
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(launch, rank, send, os.getpid()), daemon=False)
    process.start()
    send.close()
    return _Rank(process, receive)


def _child(launch: _Launch, rank: int, send: Connection, parent_pid: int) -> None:
    import torch.distributed as dist

    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPPING)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    world_size = len(launch.devices)

    def report(kind: str, value: Any) -> None:
        with suppress(OSError):
            send.send_bytes(json.dumps({"kind": kind, "value": value}).encode())

    result, failure, log = run_rank(
        launch.body, rank=rank, world_size=world_size, local_world_size=world_size, device=launch.devices[rank],
        make_store=(lambda: dist.FileStore(str(launch.store), world_size)) if world_size > 1 else None,
        board=launch.board, slot=rank, attempt=launch.attempt, run_dir=launch.run_dir, timeout_s=launch.timeout_s,
        report=lambda failure: report("failure", [failure.to_json(), ""]), fault_policy=launch.fault_policy,
        secret=launch.secret,
        num_starts=launch.num_starts, deaths=tuple(launch.deaths), restarts=launch.restarts)
    if failure is not None:
        report("failure", [failure.to_json(), str(log or "")])
        sys.exit(failure.exit_code)
    report("result", result)


@contextmanager
def _forwarded_signals(ranks: list[_Rank]) -> Iterator[list[int]]:
    """While the ranks run, SIGINT and SIGTERM ask them to stop; a second one kills them."""
    received: list[int] = []

    def forward(number: int) -> None:
        received.append(number)
        for rank in ranks:
            if rank.process.is_alive():
                (rank.process.terminate if len(received) == 1 else rank.process.kill)()

    with signals.handled(signals.STOPPING, forward):
        yield received


def _collect(launch: _Launch, ranks: list[_Rank], interrupted: list[int]) -> None:
    """Hear every rank out, and start again those that the others go on without.

    After a first failure, or when only optional ranks are left, the others get a few seconds; none if all are
    started again and who died is known.
    """
    deadline: float | None = None
    while open_ranks := [rank for rank in ranks if not rank.finished]:
        wait([source for rank in open_ranks for source in (rank.pipe, rank.process.sentinel)], timeout=0.5)
        for number, rank in enumerate(ranks):
            if not rank.finished:
                _hear(number, rank, launch.board, interrupted)
        cause = _cause(launch, ranks)
        if cause is not None and not cause.heard and _may_restart(launch, cause, interrupted):
            return
        is_over = all(rank.finished for number,
                      rank in enumerate(ranks) if number not in launch.fault_policy.optional_ranks)
        if deadline is None and (is_over or cause is not None):
            deadline = time.monotonic() + _GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return
        if deadline is None:
            _restart_lost(launch, ranks, interrupted)


def _restart_lost(launch: _Launch, ranks: list[_Rank], interrupted: list[int]) -> None:
    """Start optional ranks again that died, or that say nothing and so are of no use to anybody."""
    for number in sorted(launch.fault_policy.optional_ranks):
        rank, silent_s = ranks[number], time.monotonic() - launch.board.read(number).time_s
        if not rank.finished and silent_s > launch.timeout_s + _SPEAK_S and launch.restarts and not interrupted:
            rank.process.kill()
            rank.process.join()
            _hear(number, rank, launch.board, interrupted)
        if rank.finished and rank.failure is not None and _may_restart(launch, rank.failure, interrupted):
            _end([rank], patience_s=0.0)
            launch.deaths[number] += 1
            _tell_restart(launch, rank.failure, "it starts again")
            with _forking(launch, ranks, interrupted):
                ranks[number] = _start(launch, number)


def _hear(number: int, rank: _Rank, board: HeartbeatTable, interrupted: list[int]) -> None:
    alive = rank.process.is_alive()  # asked before the pipe is read, so that nothing said last is lost
    while rank.pipe.poll():
        try:
            said = json.loads(rank.pipe.recv_bytes())
        except (EOFError, OSError):
            break
        if said["kind"] == "failure":
            text, log = said["value"]
            rank.failure, rank.log = Failure.from_json(text), Path(log) if log else None
        else:
            rank.result, rank.finished = said["value"], True
    if not alive:
        if not rank.finished and rank.failure is None:
            rank.process.join()
            code, sign = rank.process.exitcode, board.read(number)
            ours = interrupted and -code in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
            rank.failure = stopped(number, interrupted[0], sign) if ours else killed(number, code, sign)
        rank.finished = True


def _end(ranks: list[_Rank], *, patience_s: float = 0.2) -> None:
    for rank in ranks:
        rank.process.join(_GRACE_S if rank.failure is None and rank.finished else patience_s)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.pipe.close()
