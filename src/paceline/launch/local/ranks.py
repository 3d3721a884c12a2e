"""Ranks as forked processes of this one: no port to collide on, and what was imported is paid for once."""

from __future__ import annotations

import re
import secrets
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from paceline.base import signals
from paceline.base.errors import PeerLost
from paceline.base.fork import refuse_used_cuda
from paceline.base.inherited import close_connections
from paceline.base.logs import leave_live_line
from paceline.base.temporary import temporary_folder
from paceline.cluster.devices import Device
from paceline.launch.process.context import RankContext
from paceline.launch.process.failure import (
    Failure,
    cause_of,
    ended_alone,
    ended_by,
    stopped,
)
from paceline.launch.process.fault_policy import ALL_NEEDED, FaultPolicy, RestartPolicy
from paceline.launch.process.heartbeats import HeartbeatTable, signs_of_life
from paceline.launch.process.memory_store import StateCopies
from paceline.launch.process.messages import Line, Message, RanksGone
from paceline.launch.process.outside_watch import OutsideWatch, be_watched
from paceline.launch.process.rank_process import Body, run_rank, set_up_device, store_in
from paceline.launch.process.supervisor import Supervisor

_GRACE_S = 5.0  # after a first failure, for the other ranks to report and leave
_SPEAK_S = 5.0  # after the timeout, for a rank that hangs to say where


@dataclass
class _Rank:
    """What a rank said. finished: nothing more is to be heard."""

    result: Any = None
    failure: Failure | None = None
    log: str | None = None
    finished: bool = False


class Listener(Protocol):
    """Hears what the first rank says of the run while ranks work."""

    def on_report(self) -> dict[str, Any] | None:
        """Something happened, and nobody waits. Returns an order to the first rank, if there is one."""

    def on_question(
        self, question: Any, exchange: Callable[[dict[str, Any]], Any]
    ) -> dict[str, Any]:
        """The first rank waits for this answer. exchange: gives it an order before, and returns what it says to that.

        Raises:
            RanksGone: from `exchange`, the rank is no more.
        """

    def tell_slow(self, after_s: float) -> None:
        """It has had so long, or so long again, for the last report or question. From another thread."""


class _ListenerAbandoned(BaseException):
    """A second signal came while the listener ran, which nobody waits for any longer."""


@dataclass(frozen=True)
class _Launch:
    """What ranks are started with.

    listener: hears the first rank. idle: work beside the ranks.
    watch: looks for hangs. copies: of the run's state, for ranks that are started again.
    name: of this launch. num_starts, deaths: of all ranks until now, and of each rank.
    """

    body: Body
    devices: Sequence[Device]
    board: HeartbeatTable
    watch: OutsideWatch
    rendezvous: Path
    run_dir: Path | None
    timeout_s: float
    fault_policy: FaultPolicy
    restarts: RestartPolicy
    deaths: tuple[int, ...]
    copies: StateCopies | None
    listener: Listener | None = None
    idle: Callable[[HeartbeatTable], None] | None = None
    num_starts: int = 0
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))


def run_local(
    body: Body,
    devices: Sequence[Device],
    *,
    run_dir: Path | None = None,
    timeout_s: float = 300.0,
    idle: Callable[[HeartbeatTable], None] | None = None,
    fault_policy: FaultPolicy = ALL_NEEDED,
    restarts: int = 0,
    listener: Listener | None = None,
) -> list[Any]:
    """Run `body(context)` as one rank a device and return the results in rank order.

    Results travel as JSON. The ranks are forks, so the body may be any closure; nothing is pickled. Ctrl-C and
    SIGTERM are passed on to the ranks, which stop after their step; a second one, or a parent that dies, kills them.
    A second one also ends what the listener does.

    Args:
        run_dir: Where each rank's log goes; without it only rank 0 is heard.
        timeout_s: How long a rank may give no sign of life while others wait.
        idle: Called in another process, at a low priority, after the ranks have started.
        fault_policy: Which ranks the others go on without; the result of one that was killed is None.
        restarts: How often ranks that died or hang are started again: such a one alone, or else all of them, with
            `context.num_starts` above 1 and what they copied to `context.copies`. A rank that raised an error is not:
            it would again. Neither are ranks that keep dying without a new step.
        listener: Hears what rank 0 reports and asks, in this process.

    Raises:
        RankFailed: with the report of the rank whose failure the others followed from.
        PacelineError: CUDA is already in use in this process, which forks can't share.
    """
    from paceline.launch.process.background import run_beside  # which imports torch

    refuse_used_cuda()
    board = HeartbeatTable(len(devices))
    with (
        temporary_folder() as rendezvous,
        _copies(devices, restarts) as copies,
    ):
        every_rank = {rank: rank for rank in range(len(devices))}
        launch = _Launch(
            body,
            devices,
            board,
            OutsideWatch(board, every_rank, patience_s=timeout_s),
            rendezvous,
            run_dir,
            timeout_s,
            fault_policy,
            RestartPolicy(restarts),
            (0,) * len(devices),
            copies,
            listener,
            idle,
        )
        with (
            closing(Supervisor(partial(_be_rank, launch))) as processes,
            _forwarded_signals(processes, listens := Event()) as interrupted,
        ):
            ranks = _Ranks(launch, processes, interrupted, listens)
            try:
                ranks.start_all()
                with run_beside(idle, board, processes):
                    while (cause := ranks.cause_of_end()) is not None and ranks.may_restart(cause):
                        ranks.restart_all(cause)
                    if cause is not None:
                        raise ended_by(cause, ranks.of[cause.rank].log, interrupted)
            finally:
                ranks.end_all()
    return [rank.result for rank in ranks.of]


@contextmanager
def _copies(devices: Sequence[Device], restarts: int) -> Iterator[StateCopies | None]:
    """None where no rank is started again, or ranks are held to a size that has no room for copies."""
    if not restarts or any(device.is_limit for device in devices):
        yield None
        return
    with closing(StateCopies(len(devices))) as copies:
        yield copies


def _be_rank(launch: _Launch, rank: int, line: Line) -> None:
    """In the rank's process."""
    if launch.idle is not None and rank == len(launch.devices):
        from paceline.launch.process.background import be_beside

        be_beside(launch.idle, launch.board)
        return
    be_watched(launch.board, rank)
    start, world_size = line.start().value, len(launch.devices)
    if (
        world_size > 1 or start["num_starts"] > 1
    ):  # the first process of a rank alone is the only one to use them
        close_connections()
    device = launch.devices[rank]
    context = RankContext(
        rank,
        world_size,
        world_size,
        set_up_device(device, world_size),
        None,
        launch.board,
        rank,
        f"{launch.name}-{start['num_starts']}",
        secret=launch.secret,
        timeout_s=launch.timeout_s,
        num_starts=start["num_starts"],
        deaths=tuple(start["deaths"]),
        restarts=start["restarts"],
        line=line if launch.listener is not None and rank == 0 else None,
        copies=launch.copies,
        is_watched=True,
    )
    # Not the store that the ranks of an earlier start have left.
    store = launch.rendezvous / f"store-{context.num_starts}"
    result, failure, log = run_rank(
        launch.body,
        context,
        device,
        run_dir=launch.run_dir,
        fault_policy=launch.fault_policy,
        make_store=store_in(store, world_size),
        report=lambda failure: line.end(None, failure),
    )
    line.end(result, failure, log)
    if failure is not None:
        sys.exit(failure.exit_code)


@contextmanager
def _forwarded_signals(processes: Supervisor, listens: Event) -> Iterator[list[int]]:
    """While the ranks run, a request to stop is passed on to them; a second one kills them, and ends the listener.

    listens: set while the listener runs.
    """
    received: list[int] = []

    def forward(number: int) -> None:
        received.append(number)
        processes.signal(signal.SIGTERM if len(received) == 1 else signal.SIGKILL)
        if len(received) > 1 and listens.is_set():
            listens.clear()
            raise _ListenerAbandoned

    with signals.handled(signals.STOPPING, forward):
        yield received


class _Ranks:
    """The ranks of a launch, from their start to their end.

    interrupted: signals that asked to stop; they grow while the ranks run. listens: set while the listener runs.
    """

    def __init__(
        self, launch: _Launch, processes: Supervisor, interrupted: Sequence[int], listens: Event
    ) -> None:
        self.launch, self.processes, self.interrupted, self.listens = (
            launch,
            processes,
            interrupted,
            listens,
        )
        self.of = [_Rank() for _ in launch.devices]

    def start_all(self) -> None:
        self.launch = replace(self.launch, num_starts=self.launch.num_starts + 1)
        with signals.blocked():
            for number in range(len(self.of)):
                self._start(number)

    def _start(self, number: int) -> None:
        """Start a rank, again if it was there. It hears of a signal that came just before."""
        launch, self.of[number] = self.launch, _Rank()
        with signals.blocked():
            launch.board.write(number, 0, "start")
            launch.board.set_waits(number, False)
            launch.board.set_died(number, False)
            self.processes.start(number)
            self.processes.tell(
                number,
                Message(
                    0,
                    "start",
                    number,
                    {
                        "num_starts": launch.num_starts,
                        "deaths": launch.deaths,
                        "restarts": launch.restarts.left,
                    },
                ),
            )
            if self.interrupted:
                self.processes.signal(signal.SIGTERM, [number])

    def end_all(self) -> None:
        for number, rank in enumerate(self.of):
            self.processes.end(
                number, patience_s=_GRACE_S if rank.failure is None and rank.finished else 0.2
            )
        if any(rank.failure is not None for rank in self.of):
            leave_live_line()

    def restart_all(self, cause: Failure) -> None:
        lost = {rank.failure.rank for rank in self.of if rank.failure and not rank.failure.heard}
        for number in range(len(self.of)):
            self.processes.end(number)
        self._note_restart(lost, cause, "all ranks start again")
        self.start_all()

    def may_restart(self, failure: Failure) -> bool:
        """Whether who died, or hung, is to be started again, and can."""
        may_help = failure.kind == PeerLost.__name__
        can = not self.interrupted and not self.processes.is_server_lost
        return may_help and can and not self.launch.restarts.why_not(failure.step, failure.rank)

    def _note_restart(self, lost: set[int], failure: Failure, measure: str) -> None:
        """Count a restart and say why."""
        rank = failure.rank
        left = self.launch.restarts.count(failure.step, rank)
        self.launch = replace(
            self.launch,
            deaths=tuple(
                deaths + (number in lost) for number, deaths in enumerate(self.launch.deaths)
            ),
        )
        leave_live_line()
        why = re.sub(rf"^rank {rank}\b(?!,)", "it", failure.message.partition("\n")[0])
        if failure.trace:
            print(failure.describe(), file=sys.stderr)
        print(f"rank {rank}: {why}; {measure} {left}", file=sys.stderr, flush=True)

    def _cause(self) -> Failure | None:
        """What ends the run before its time: not an optional rank that is merely gone, but an error of any rank."""
        failures = [
            rank.failure
            for rank in self.of
            if rank.failure
            and not (
                rank.failure.rank in self.launch.fault_policy.optional_ranks
                and rank.failure.kind == PeerLost.__name__
            )
        ]
        return cause_of(failures) if failures else None

    def cause_of_end(self) -> Failure | None:
        """Hear every rank out, and start those again that the others go on without; what ended the run, if it failed.

        After a first failure, or when only optional ranks are left, the others get a few seconds; none if all are
        started again and who died is known.
        """
        deadline_s: float | None = None
        optional = self.launch.fault_policy.optional_ranks
        while unfinished := [number for number, rank in enumerate(self.of) if not rank.finished]:
            for number, message in self.processes.wait(unfinished, 0.5):
                self._hear(number, self.of[number], message)
            if (hang := self._hang()) is not None:
                return hang
            cause = self._cause()
            if cause is not None and not cause.heard and self.may_restart(cause):
                return cause
            is_over = all(
                rank.finished for number, rank in enumerate(self.of) if number not in optional
            )
            if deadline_s is None and (is_over or cause is not None):
                deadline_s = time.monotonic() + _GRACE_S
            if deadline_s is not None and time.monotonic() > deadline_s:
                break
            if deadline_s is None:
                self._restart_lost()
        return self._cause()

    def _hang(self) -> Failure | None:
        """The report of a hang, once there is one. Ranks that the others go on without are looked at elsewhere."""
        optional = self.launch.fault_policy.optional_ranks
        needed = [n for n, rank in enumerate(self.of) if not rank.finished and n not in optional]
        hang = self.launch.watch.look(self.processes.pids(needed))
        if hang is None or self._cause() is not None:
            return None
        self.of[hang.rank].failure = hang
        return hang

    def _restart_lost(self) -> None:
        """Start optional ranks again that died; those that say nothing, and so are of no use to anybody, are killed."""
        for number in sorted(self.launch.fault_policy.optional_ranks):
            rank, silent_s = (
                self.of[number],
                time.monotonic() - self.launch.board.read(number).time_s,
            )
            if rank.finished and rank.failure is not None and self.may_restart(rank.failure):
                self._note_restart({number}, rank.failure, "it starts again")
                self._start(number)
            elif (
                not rank.finished
                and silent_s > self.launch.timeout_s + _SPEAK_S
                and self.launch.restarts.left
                and not self.interrupted
            ):
                self.processes.signal(signal.SIGKILL, [number])

    def _hear(self, number: int, rank: _Rank, message: Message) -> None:
        if message.kind == "end":
            rank.result, rank.failure, rank.log = message.value, message.failure, message.log
            rank.finished = message.failure is None
            return
        if message.kind in ("report", "question"):
            self._listen(number, message)
            return
        rank.finished = True
        if rank.failure is None:
            self.launch.board.set_died(number, True)
            sign, code = self.launch.board.read(number), message.value
            ended_by = -(code or 0)
            if self.interrupted and ended_by in (*signals.STOPPING, signal.SIGKILL):
                rank.failure = stopped(number, self.interrupted[0], sign)
            else:
                rank.failure = ended_alone(
                    number, code, sign, with_server=self.processes.is_server_lost
                )

    def _listen(self, number: int, message: Message) -> None:
        """Let the listener hear what a rank says, and pass on what it answers."""
        listener, is_report, timeout_s = (
            self.launch.listener,
            message.kind == "report",
            self.launch.timeout_s,
        )
        assert listener is not None
        with suppress(RanksGone, _ListenerAbandoned):  # the rank's end is what follows
            self.listens.set()
            try:
                with signs_of_life(partial(listener.tell_slow, timeout_s), every_s=timeout_s):
                    word = (
                        listener.on_report()
                        if is_report
                        else listener.on_question(message.value, partial(self._exchange, number))
                    )
            finally:
                self.listens.clear()
            if word is not None:
                self.processes.tell(
                    number, Message(0, "order" if is_report else "answer", number, word)
                )

    def _exchange(self, number: int, order: dict[str, Any]) -> Any:
        """Have a rank that waits do something, and wait until it has.

        Raises:
            RanksGone: it ended.
        """
        self.processes.tell(number, Message(0, "answer", number, order))
        replies: list[Any] = []
        while not replies:
            unfinished = [other for other, rank in enumerate(self.of) if not rank.finished]
            if number not in unfinished or self._cause() is not None:
                raise RanksGone
            for other, message in self.processes.wait(unfinished, 0.5):
                if other == number and message.kind == "question":
                    replies.append(message.value)
                else:
                    self._hear(other, self.of[other], message)
        return replies[0]
