"""Ranks of several hosts that go on with fewer hosts if one is lost, and take it back. The first host keeps the store
where they meet, and they can't go on without it.

torch's elastic agent runs in each host's process: its rendezvous decides which hosts take part, its loop starts the
ranks again when that changes. The ranks are forks of the process, which has imported everything.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from paceline.base import signals
from paceline.base.errors import PacelineError, PeerLost, Preempted
from paceline.launch.hosts.copy_service import CopyAddress
from paceline.launch.hosts.environment import Environment
from paceline.launch.hosts.host_copies import HostCopies
from paceline.launch.hosts.keeper import MeetingPlace
from paceline.launch.hosts.rendezvous_state import JsonBackend, asked
from paceline.launch.process import host_context
from paceline.launch.process.failure import (
    Failure,
    RankFailed,
    cause_of,
    failure_of,
    killed,
    left_in,
)
from paceline.launch.process.fault_policy import JOIN_S, RestartPolicy
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.launch.process.messages import Line, Message
from paceline.launch.process.outside_watch import OutsideWatch, SeenByAll, be_watched, within
from paceline.launch.process.supervisor import Supervisor
from paceline.torch_private.rendezvous import stop_heartbeats

_SOON_S = 3.0  # for other hosts, after enough of them are there and the run has begun before
_MONITOR_S = 0.1  # between looks at the ranks; torch's own default
_HEARD_S = 1.5  # for a host to say what its ranks ended of, if others only heard
_RETRY_S = 0.5  # between attempts to reach the meeting place
_PARTED_S = 5.0  # the keeper leaves after the others have
_RUN = "paceline"
_END, _STARTS = (
    f"{_RUN}/end",
    f"{_RUN}/starts",
)  # keys of the store: the failure that ended the run, and a number
_UNREACHED = (RendezvousConnectionError, dist.DistError)


def run_host(
    meeting: MeetingPlace,
    num_ranks: int,
    body: Callable[[], None],
    *,
    patience_s: float,
    restarts: int,
) -> None:
    """Run `body()` as the ranks of this host until the run has ended; ranks find their place in the environment, as
    under torchrun.

    Args:
        patience_s: How long a rank, or a host, may give no sign of life.
        restarts: How often ranks are started again because some were lost. Hosts that come and go are not counted.

    Raises:
        RankFailed: the run ended early, and why.
        PeerLost: too few hosts came, or the others can't be reached.
    """
    for name in ("torch.distributed.elastic", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what there is to say is said here
    # What torch shares by default is the store of an agent that may be lost, under an address that is never renewed.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    shared = _Shared(HeartbeatTable(num_ranks), HostCopies(num_ranks) if restarts else None)
    with ExitStack() as stack:
        watch = OutsideWatch(
            shared.board, dict.fromkeys(range(num_ranks), 0), patience_s=patience_s
        )
        processes = stack.enter_context(
            closing(Supervisor(partial(_be_rank, body, shared, interface)))
        )
        if shared.copies is not None:
            shared.copies.serve(meeting.address or meeting.place.address, meeting.listens_at)
            stack.callback(shared.copies.close)
        _ElasticHost(
            meeting, num_ranks, shared, watch, processes, patience_s=patience_s, restarts=restarts
        ).run()


@dataclass(frozen=True)
class _Shared:
    """Memory that this host's process and its ranks share. copies: None without restarts."""

    board: HeartbeatTable
    copies: HostCopies | None


def _be_rank(
    body: Callable[[], None],
    shared: _Shared,
    interface: str | None,
    slot: int,
    line: Line,
) -> None:
    """In a rank's process."""
    if interface is None:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)  # forks that serve one host have loopback there
    board = shared.board
    be_watched(board, slot)
    start = line.start().value
    os.environ.update(start["environ"])
    if shared.copies is not None:
        shared.copies.address = CopyAddress(**start["copies"])
    host_context.begin(
        host_context.HostContext(partial(line.end, None), board, slot, shared.copies)
    )
    try:
        body()
    except RankFailed as failed:
        line.end(None, failed.failure)
        sys.exit(failed.exit_code)
    except PacelineError as error:  # before there was a run
        line.end(None, failure_of(error, rank=int(os.environ["RANK"]), sign=board.read(slot)))
        sys.exit(error.exit_code)
    line.end(None, None)


class _Timeouts(RendezvousTimeout):
    """has_begun: whether this host was in the run before. A run that begins waits for all its hosts for a while; one
    that goes on does not wait for those that are lost."""

    def __init__(self, patience_s: float) -> None:
        super().__init__(join=timedelta(seconds=JOIN_S))
        self.patience_s, self.has_begun = patience_s, False

    @property
    def last_call(self) -> timedelta:
        return timedelta(
            seconds=min(_SOON_S, self.patience_s) if self.has_begun else self.patience_s
        )


class _ElasticHost:
    """This host in a run, over all times that it joins it.

    interrupted: signals that asked it to leave. lost_s: since when it can't meet the others; None once ranks start.
    num_starts: of the run's ranks, as far as this host took part.
    """

    def __init__(
        self,
        meeting: MeetingPlace,
        num_ranks: int,
        shared: _Shared,
        watch: OutsideWatch,
        processes: Supervisor,
        *,
        patience_s: float,
        restarts: int,
    ) -> None:
        self.meeting, self.place, self.num_ranks = meeting, meeting.place, num_ranks
        self.watch, self.processes = watch, processes
        self.board, self.copies = shared.board, shared.copies
        self.patience_s, self.restarts = patience_s, RestartPolicy(restarts)
        self.silence_s = meeting.silence_s
        self.timeouts = _Timeouts(self.silence_s)
        self.interrupted: list[int] = []
        self.lost_s: float | None = None
        self.num_starts = 0

    def run(self) -> None:
        with signals.handled(signals.STOPPING, self._forward):
            while True:
                try:
                    self._be_agent(self.meeting.meet())
                    return
                except _UNREACHED as error:
                    self._note_unreached(error)

    def _forward(self, number: int) -> None:
        self.interrupted.append(number)
        self.processes.signal(signal.SIGTERM if len(self.interrupted) == 1 else signal.SIGKILL)

    def _note_unreached(self, error: Exception) -> None:
        """Say once what this host waits for, and wait a little.

        Raises:
            PeerLost: for too long. Preempted: this host was asked to leave.
        """
        why = str(error) if self.meeting.is_kept_here else self.meeting.why_not()
        if self.interrupted:
            raise Preempted(f"stopped by {signal.Signals(self.interrupted[0]).name}: {why}")
        now_s = time.monotonic()
        if self.lost_s is None:
            self.lost_s = now_s
            print(
                f"host {self.place.index}: {why}; it tries for {JOIN_S:g} s",
                file=sys.stderr,
                flush=True,
            )
        if now_s - self.lost_s > JOIN_S:
            raise PeerLost(
                f"host {self.place.index} could not meet the others for {JOIN_S:g} s: {why}",
                hint="the same command with --resume on all hosts goes on from the newest checkpoint; if host 0 "
                "is lost for good, number the others from 0, and PET_MASTER_ADDR is the new first host",
            ) from error
        time.sleep(_RETRY_S)

    def _be_agent(self, store: Any) -> None:
        """Take part until the run has ended, or the others can't be reached."""
        least_hosts = self.place.least_hosts or self.place.num_hosts
        handler = DynamicRendezvousHandler.from_backend(
            _RUN,
            store,
            JsonBackend(store, timeout_s=self.meeting.answer_s),
            least_hosts,
            self.place.num_hosts,
            self.meeting.address,
            self.timeouts,
            keep_alive_interval=self.silence_s / 5,  # type: ignore[arg-type]  # it becomes a timedelta
            keep_alive_max_attempt=5,
        )
        agent = _Agent(
            WorkerSpec(
                _RUN,
                self.num_ranks,
                handler,
                entrypoint=_RUN,
                monitor_interval=_MONITOR_S,
            ),
            self,
            store,
        )
        try:
            cause = agent.cause if agent.run(_RUN).is_failed() else None
            if cause is None or self.meeting.is_kept_here or not self.interrupted:
                end = "" if cause is None else cause.to_json()
                within(self.meeting.answer_s, lambda: store.set(_END, end))
                with suppress(RendezvousConnectionError):
                    handler.set_closed()
        except RendezvousTimeoutError as error:
            raise PeerLost(
                f"fewer than {least_hosts} hosts have come within {JOIN_S:g} s",
                hint="each host runs the same command",
            ) from error
        except (RendezvousClosedError, RendezvousGracefulExitError):
            text = self._ended_by(store)
            cause = Failure.from_json(text) if text else None
            print(f"host {self.place.index}: the run has ended", file=sys.stderr, flush=True)
        finally:
            stop_heartbeats(handler)  # what torch has for it ends the run
        self._part(store, agent.num_hosts)
        if cause is not None:
            raise RankFailed(cause)

    def _ended_by(self, store: Any) -> str:
        """Return the failure that ended the run, which other hosts left in the store; "" if there was none."""

        def ask() -> str:
            return str(store.get(_END).decode()) if store.check([_END]) else ""

        return within(self.meeting.answer_s, ask) or ""

    def _part(self, store: Any, num_hosts: int) -> None:
        """Keep the store until the others need it no more. One whose host has vanished gives them no answer."""

        def part() -> None:
            num_left, deadline_s = store.add(f"{_RUN}/left", 1), time.monotonic() + _PARTED_S
            while (
                self.meeting.is_kept_here and num_left < num_hosts and time.monotonic() < deadline_s
            ):
                time.sleep(_MONITOR_S)
                num_left = store.add(f"{_RUN}/left", 0)

        within(_PARTED_S + self.silence_s, part)


class _Agent(SimpleElasticAgent):
    """torch's agent over forks of this process.

    shared_store: of all starts. cause: why ranks ended last. num_hosts: that take part.
    """

    def __init__(self, spec: WorkerSpec, host: _ElasticHost, shared_store: Any) -> None:
        super().__init__(spec)
        self.host, self.shared_store = host, shared_store
        self.cause: Failure | None = None
        self.num_hosts = 1
        self._failures: dict[int, Failure] = {}
        self._finished: set[int] = set()
        self._first_rank = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        host, store, place = self.host, worker_group.store, self.host.place
        assert store is not None and worker_group.group_rank is not None
        self.num_hosts = worker_group.group_world_size or 1
        host.num_starts = number = self._begin_start(store, worker_group.group_rank)
        address = host.meeting.address or place.address
        self._failures, self._finished = {}, set()
        self._first_rank = worker_group.workers[0].global_rank
        host.timeouts.has_begun, host.lost_s = True, None
        world_size = worker_group.workers[0].world_size
        host.watch.ranks = {each.local_rank: each.global_rank for each in worker_group.workers}
        host.watch.seen_by_all = (
            SeenByAll(store, world_size) if world_size > host.num_ranks else None
        )
        print(
            f"host {place.index} ({address}): start {number} of the run, with "
            f"{self.num_hosts} of {place.num_hosts} hosts",
            file=sys.stderr,
            flush=True,
        )
        copies = host.copies and asdict(host.copies.address)
        with signals.blocked():
            for worker in worker_group.workers:
                slot = worker.local_rank
                started = Environment(
                    "torchrun",
                    worker.global_rank,
                    worker.world_size,
                    slot,
                    host.num_ranks,
                    place.address,
                    place.port,
                    number,
                )
                host.board.write(slot, 0, "start")
                host.board.set_waits(slot, False)
                host.processes.start(slot)
                host.processes.tell(
                    slot,
                    Message(
                        0,
                        "start",
                        slot,
                        {
                            "copies": copies,
                            "environ": {
                                **started.variables,
                                "GROUP_RANK": str(worker_group.group_rank),
                                "TORCHELASTIC_USE_AGENT_STORE": str(True),
                            },
                        },
                    ),
                )
            if host.interrupted:
                host.processes.signal(signal.SIGTERM)
        return host.processes.pids(range(host.num_ranks))

    def _begin_start(self, store: Any, group_rank: int) -> int:
        """Return the number of this start. No earlier one of the hosts that are here has it, nor one in this store."""
        store.set(f"host/{group_rank}", str(self.host.num_starts))
        if group_rank == 0:
            keys = [f"host/{rank}" for rank in range(self.num_hosts)]
            latest, counted = (
                max(map(int, store.multi_get(keys))),
                self.shared_store.add(_STARTS, 0),
            )
            store.set("start", str(self.shared_store.add(_STARTS, max(1, latest + 1 - counted))))
        return int(store.get("start"))

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Ranks that work save at their step's end, because a host joins the run; others have lost one, and end."""
        if worker_group.state == WorkerState.HEALTHY:
            print(
                f"host {self.host.place.index}: another host joins; ranks save and start again",
                file=sys.stderr,
                flush=True,
            )
            self.host.processes.signal(signal.SIGTERM)
            until_s = time.monotonic() + self.host.patience_s
            while self._unfinished_slots() and time.monotonic() < until_s:
                self._hear(_MONITOR_S)
        self._end_ranks()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._end_ranks()

    def _end_ranks(self) -> None:
        for slot in range(self.host.num_ranks):
            self.host.processes.end(slot)
        if self.host.copies is not None:
            self.host.copies.rest()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look_for_hangs()
        self._hear(0.0)  # also of a rank that knows more, while other hosts were asked
        ranks = [worker.global_rank for worker in worker_group.workers]
        if len(self._finished) == len(ranks) and not self._failures:
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(ranks))
        store: Any = worker_group.store
        if not all(failure.is_stop for failure in self._failures.values()) or self._ask(
            lambda: store.check(["failed"])
        ):
            return self._failed(self._cause(store))
        return (
            self._stopped()
            if self._failures and not self._unfinished_slots()
            else RunResult(WorkerState.HEALTHY)
        )

    def _unfinished_slots(self) -> list[int]:
        return [slot for slot in range(self.host.num_ranks) if slot not in self._finished]

    def _hear(self, timeout_s: float) -> None:
        for slot, message in self.host.processes.wait(self._unfinished_slots(), timeout_s):
            if message.kind == "end":
                if message.failure is not None:
                    self._failures[slot] = message.failure
            elif message.kind == "ended":
                self._finished.add(slot)
                if message.value and slot not in self._failures:
                    self._failures[slot] = self._ended(slot, message.value)

    def _ended(self, slot: int, code: int) -> Failure:
        """The report of a rank that left none."""
        failure = killed(self._first_rank + slot, code, self.host.board.read(slot))
        if code > 0:  # it has said why, or another one has
            return replace(failure, exit_code=code, heard=True)
        return failure

    def _look_for_hangs(self) -> None:
        slots = [
            slot
            for slot in self._unfinished_slots()
            if slot not in self._failures and self.host.board.read(slot).phase != "start"
        ]
        if (hang := self.host.watch.look(self.host.processes.pids(slots))) is not None:
            hang = replace(hang, host=hang.host or "another host")
            self._failures[hang.rank - self._first_rank] = hang

    def _ask(self, ask: Callable[[], Any]) -> Any:
        """See `asked`."""
        return asked(self.host.silence_s, ask)

    def _cause(self, store: Any) -> Failure:
        """What made ranks end, of what all hosts say; waits a little for the host of the culprit."""
        failures = list(self._failures.values())
        if failures:
            local_cause, key = cause_of(failures), f"failure/{self.get_worker_group().group_rank}"
            self._ask(lambda: store.set(key, local_cause.to_json()) or True)
        until_s = time.monotonic() + _HEARD_S
        while all(failure.heard for failure in failures) and time.monotonic() < until_s:
            failures = [
                *self._failures.values(),
                *self._ask(lambda: left_in(store, range(self.num_hosts))),
            ]
            time.sleep(_MONITOR_S / 2)
        self._ask(lambda: store.set("failed", "1") or True)
        return cause_of(failures)

    def _failed(self, cause: Failure) -> RunResult:
        """Let torch's loop start the ranks again, if that can help."""
        self.cause, restarts = cause, self.host.restarts
        may_restart = (
            cause.exit_code == PeerLost.exit_code
            and not self.host.interrupted
            and not restarts.why_not(cause.step)
        )
        if may_restart:
            if cause.trace:
                print(cause.describe(), file=sys.stderr)
            culprit = (
                "" if cause.heard else f"rank {cause.rank} on {cause.host}: "
            )  # who only heard names the other
            why = cause.message.partition("\n")[0]
            print(
                f"{culprit}{why}; all ranks start again {restarts.count(cause.step)}",
                file=sys.stderr,
                flush=True,
            )
        return self._ended_run(may_restart)

    def _ended_run(self, may_restart: bool) -> RunResult:
        self._remaining_restarts = int(may_restart)  # torch's loop takes it off again
        return RunResult(WorkerState.FAILED)

    def _stopped(self) -> RunResult:
        """All ranks have saved and ended, as this host leaves or as another one comes or leaves."""
        self.cause = cause_of(list(self._failures.values()))
        if self.host.interrupted:
            self.cause = self.cause.asked_by(self.host.interrupted[0])
        return self._ended_run(not self.host.interrupted)
