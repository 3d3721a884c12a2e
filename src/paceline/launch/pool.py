"""Warm ranks: one process a device, which runs task after task, alone or as a rank among others.

What was imported and loaded before the pool was made is paid for once. Tasks, reports and questions travel as JSON.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.cluster import Device
from paceline.launch.context import RankContext
from paceline.launch.failure import Failure, cause_of, killed
from paceline.launch.fault_policy import FaultPolicy
from paceline.launch.fork import refuse_used_cuda
from paceline.launch.fork_server import ForkedProcess, ForkServer
from paceline.launch.heartbeats import HeartbeatTable
from paceline.launch.worker_pool import STOP_S, Kind, TaskEvent

if TYPE_CHECKING:
    import torch

_CAUSE_S = 5.0  # for the cause of a failure to be told, once a rank has only heard of it
_STOP_SIGNAL = signal.SIGUSR1

class Line:
    """A rank's end of the connection to the pool, for the time of one task."""

    def __init__(self, connection: Connection, task: int) -> None:
        self._connection, self._task, self._lock = connection, task, threading.Lock()

    def report(self, value: Any) -> None:
        """Tell whoever started the task."""
        self._send("report", value)

    def ask(self, question: Any) -> Any:
        """Ask whoever started the task, and wait for the answer."""
        self._send("question", question)
        return json.loads(self._connection.recv_bytes())

    def end(self, value: Any, failure: Failure | None) -> None:
        self._send("end", value if failure is None else failure.to_json(), failed=failure is not None)

    def _send(self, kind: Kind, value: Any, failed: bool = False) -> None:
        with self._lock, suppress(BrokenPipeError):  # the pool has ended, and this process ends with it
            self._connection.send_bytes(json.dumps(
                {"task": self._task, "kind": kind, "value": value, "failed": failed}).encode())


TaskBody = Callable[[RankContext, Any, Line], Any]


@dataclass
class _Task:
    """slots: of its ranks, in order. kill_at_s: when ranks that have not ended are killed."""

    number: int
    slots: tuple[int, ...]
    log_dir: Path | None
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    kill_at_s: float | None = None
    is_stopped: bool = False

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank in range(len(self.slots)) if rank not in self.results and rank not in self.failures]


class Pool:
    """A warm process on each device of this machine; see `WarmRanks`. Not for use by several threads at once.

    Args:
        body: What a task does: `body(context, payload, line)` in every rank of it.
        timeout_s: How long a rank may give no sign of life while others wait.

    Raises:
        PacelineError: CUDA is already in use in this process, which forks can't share.
    """

    def __init__(self, body: TaskBody, devices: Sequence[Device], *, timeout_s: float = 300.0) -> None:
        refuse_used_cuda()
        self.devices, self._body, self._timeout_s = tuple(devices), body, timeout_s
        self._board = HeartbeatTable(len(devices))
        self._meetings = tempfile.TemporaryDirectory(prefix="paceline-")
        self._numbers = itertools.count()
        self._tasks: dict[int, _Task] = {}
        self._nursery = ForkServer(self._be_rank)
        self._members: list[ForkedProcess | None] = [self._nursery.fork(slot) for slot in range(len(devices))]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for member in filter(None, self._members):
            member.connection.close()
        self._nursery.close()
        self._meetings.cleanup()

    @property
    def names(self) -> list[str]:
        return list(map(str, self.devices))

    @property
    def nodes(self) -> list[range]:
        return [range(len(self.devices))]

    def place(self, slot: int) -> str:
        return str(self.devices[slot])

    def describe(self) -> str:
        return ", ".join(self.names)

    @property
    def free(self) -> list[int]:
        """Slots without a task."""
        taken = {slot for task in self._tasks.values() for slot in task.slots}
        return [slot for slot in range(len(self.devices)) if slot not in taken]

    def start(self, payload: Any, slots: Sequence[int], *, fault_policy: FaultPolicy,
              log_dir: Path | None = None) -> int:
        """Start a task with a rank on each of these free slots. Returns its number, which its events bear."""
        assert set(slots) <= set(self.free)
        task = _Task(next(self._numbers), tuple(slots), log_dir)
        common = {"task": task.number, "world_size": len(slots), "payload": payload, "attempt": uuid.uuid4().hex[:12],
                  "secret": secrets.token_hex(32), "log_dir": str(log_dir) if log_dir else None,
                  "uses_process_group": fault_policy.uses_process_group}
        self._tasks[task.number] = task
        for rank, slot in enumerate(slots):
            self._board.write(slot, 0, "start")
            member = self._fresh(slot)
            with suppress(OSError):  # it has died since: heard of when it is read
                member.connection.send_bytes(json.dumps({**common, "rank": rank}).encode())
        return task.number

    def _fresh(self, slot: int) -> ForkedProcess:
        """A slot's process, another if it has ended; an idle one says nothing, so there is only its end to read."""
        member = self._members[slot]
        if member is not None and member.connection.poll():
            self._replace(slot)
        self._members[slot] = member = self._members[slot] or self._nursery.fork(slot)
        return member

    def answer(self, event: TaskEvent, value: Any) -> None:
        """Answer a question, if its task has not ended since."""
        task = self._tasks.get(event.task)
        member = self._members[task.slots[event.rank]] if task is not None else None
        with suppress(OSError):
            if member is not None:
                member.connection.send_bytes(json.dumps(value).encode())

    def stop(self, number: int, *, patience_s: float = STOP_S) -> None:
        """Ask a task's ranks to end after their step; those that have not in time are killed."""
        task = self._tasks.get(number)
        if task is None or task.is_stopped:
            return
        task.is_stopped, task.kill_at_s = True, time.monotonic() + patience_s
        for rank in task.running:
            member = self._members[task.slots[rank]]
            with suppress(ProcessLookupError):
                if member is not None:
                    os.kill(member.pid, _STOP_SIGNAL)

    def wait(self, timeout_s: float, *, also: Sequence[int] = ()) -> list[TaskEvent]:
        """What happened, at once if something has, else within the timeout.

        also: descriptors; nothing happened, at once, when one of them can be read.
        """
        kills = [task.kill_at_s for task in self._tasks.values() if task.kill_at_s is not None]
        left_s = min([timeout_s, *(max(0.0, at_s - time.monotonic()) for at_s in kills)])
        places = {self._member(slot).connection: (task, rank) for task in self._tasks.values()
                  for rank, slot in enumerate(task.slots) if rank in task.running}
        events = [event for connection in wait([*places, *also], left_s) if isinstance(connection, Connection)
                  for event in self._hear(*places[connection], connection)]
        return events + self._ended()

    def _member(self, slot: int) -> ForkedProcess:
        member = self._members[slot]
        assert member is not None  # a slot with a task has one
        return member

    def _hear(self, task: _Task, rank: int, connection: Connection) -> list[TaskEvent]:
        try:
            said = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            slot = task.slots[rank]
            code = self._nursery.exit_code(self._member(slot).pid)
            task.failures.setdefault(rank, killed(rank, code, self._board.read(slot)))
            return []
        if said["kind"] == "end":
            if said["failed"]:
                task.failures[rank] = Failure.from_json(said["value"])
            else:
                task.results[rank] = said["value"]
            return []
        return [TaskEvent(task.number, said["kind"], rank, said["value"])]

    def _ended(self) -> list[TaskEvent]:
        """Tasks that are over, their slots freed. A rank that failed leaves a fresh process to the next task."""
        events = []
        for task in list(self._tasks.values()):
            if task.failures and task.running:
                told = any(not failure.heard for failure in task.failures.values())
                task.kill_at_s = min(task.kill_at_s or float("inf"), time.monotonic() + (0.0 if told else _CAUSE_S))
            if task.running and task.kill_at_s is not None and time.monotonic() >= task.kill_at_s:
                for rank in task.running:
                    self._replace(task.slots[rank])
                    if task.is_stopped:
                        task.results[rank] = None
                    else:
                        task.failures[rank] = killed(rank, -signal.SIGKILL, self._board.read(task.slots[rank]))
            if not task.running:
                events.append(self._end(task))
        return events

    def _end(self, task: _Task) -> TaskEvent:
        del self._tasks[task.number]
        if task.failures:
            for slot in task.slots:
                self._replace(slot)
        self._store(task.number).unlink(missing_ok=True)
        cause = cause_of(list(task.failures.values())) if task.failures else None
        return TaskEvent(task.number, "end", 0, task.results.get(0), cause)

    def _replace(self, slot: int) -> None:
        """End a slot's process; the next task there starts another."""
        member, self._members[slot] = self._members[slot], None
        if member is not None:
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
            member.connection.close()
            self._nursery.exit_code(member.pid)

    def _store(self, number: int) -> Path:
        return Path(self._meetings.name) / f"store-{number}"

    # --- In a rank ----------------------------------------------------------------------------------------------

    def _be_rank(self, slot: int, connection: Connection) -> None:
        from paceline.launch.logs import redirect
        from paceline.launch.process import set_up_device

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(_STOP_SIGNAL, signal.SIG_IGN)  # one that comes when the training is already over
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        where = set_up_device(self.devices[slot], len(self.devices))
        output = redirect(None)
        while True:
            try:
                told = json.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return
            log = Path(told["log_dir"]) / f"rank-{told['rank']}.log" if told["log_dir"] else None
            before, output = output, redirect(log)
            before.close()
            line = Line(connection, told["task"])
            line.end(*self._run(slot, where, told, line, log, output))
            _let_go(where)

    def _run(self, slot: int, where: torch.device, told: dict[str, Any], line: Line, log: Path | None,
             output: TextIO) -> tuple[Any, Failure | None]:
        import torch.distributed as dist

        from paceline.launch.process import run_body

        rank, world_size = told["rank"], told["world_size"]
        context = RankContext(rank, world_size, world_size, where, None, self._board, slot, told["attempt"],
                              secret=bytes.fromhex(told["secret"]), timeout_s=self._timeout_s, deaths=(0,) * world_size)
        make_store = (lambda: dist.FileStore(str(self._store(told["task"])), world_size)) if world_size > 1 else None
        found = run_body(lambda context: self._body(context, told["payload"], line), context,
                         device=self.devices[slot], make_store=make_store, terminal=output, log=log,
                         report=lambda failure: line.end(None, failure),
                         fault_policy=FaultPolicy(uses_process_group=told["uses_process_group"]))
        sys.stdout.flush()
        sys.stderr.flush()
        return found


def _let_go(device: torch.device) -> None:
    """Free what a task's model left in cycles, so that the next one starts with the whole device, and its own peak."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
