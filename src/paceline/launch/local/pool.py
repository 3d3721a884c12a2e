"""Warm ranks: one process a device, which runs task after task, alone or as a rank among others.

What was imported and loaded before the pool was made is paid for once.
"""

from __future__ import annotations

import gc
import itertools
import secrets
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.base.fork import refuse_used_cuda
from paceline.base.inherited import close_connections
from paceline.base.temporary import temporary_folder
from paceline.cluster.devices import Device
from paceline.launch.local.worker_pool import STOP_S
from paceline.launch.process.context import RankContext
from paceline.launch.process.failure import Failure, cause_of, killed
from paceline.launch.process.fault_policy import FaultPolicy
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.launch.process.messages import Line, Message
from paceline.launch.process.outside_watch import OutsideWatch, be_watched
from paceline.launch.process.supervisor import Supervisor

if TYPE_CHECKING:
    import torch

_CAUSE_S = 5.0  # for the cause of a failure to be told, once a rank has only heard of it
_LOOK_S = 0.5  # between looks for ranks that hang
_STOP_SIGNAL = signal.SIGUSR1


TaskBody = Callable[[RankContext, Any, Line], Any]


@dataclass
class _Task:
    """slots: of its ranks, in order. kill_at_s: when ranks that have not ended are killed. asked: ranks that wait for
    an answer."""

    number: int
    slots: tuple[int, ...]
    watch: OutsideWatch
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    kill_at_s: float | None = None
    is_stopped: bool = False

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [
            rank
            for rank in range(len(self.slots))
            if rank not in self.results and rank not in self.failures
        ]


class Pool:
    """A warm process on each device of this machine; see `WorkerPool`. Not for use by several threads at once.

    Args:
        body: What a task does: `body(context, payload, line)` in every rank of it.
        timeout_s: How long a rank may give no sign of life while others wait.

    Raises:
        PacelineError: CUDA is already in use in this process, which forks can't share.
    """

    def __init__(
        self, body: TaskBody, devices: Sequence[Device], *, timeout_s: float = 300.0
    ) -> None:
        refuse_used_cuda()
        self.devices, self._body, self._timeout_s = tuple(devices), body, timeout_s
        self._board = HeartbeatTable(len(devices))
        for slot in range(len(devices)):
            self._board.stack(slot)  # which the ranks share
        self._folder = ExitStack()
        self._meetings = self._folder.enter_context(temporary_folder())
        self._numbers = itertools.count()
        self._tasks: dict[int, _Task] = {}
        self._processes = Supervisor(self._be_rank)
        for slot in range(len(devices)):
            self._processes.start(slot)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        self._processes.close()
        self._folder.close()

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

    def start(
        self,
        payload: Any,
        slots: Sequence[int],
        *,
        fault_policy: FaultPolicy,
        log_dir: Path | None = None,
        number: int | None = None,
    ) -> int:
        """Start a task with a rank on each of these free slots. Returns its number, which its messages bear: another
        than any before, if the caller gives it."""
        assert set(slots) <= set(self.free)
        ranks = {slot: rank for rank, slot in enumerate(slots)}
        task = _Task(
            next(self._numbers) if number is None else number,
            tuple(slots),
            OutsideWatch(self._board, ranks, patience_s=self._timeout_s),
        )
        common = {
            "world_size": len(slots),
            "payload": payload,
            "attempt": uuid.uuid4().hex[:12],
            "secret": secrets.token_hex(32),
            "log_dir": str(log_dir) if log_dir else None,
            "uses_process_group": fault_policy.uses_process_group,
        }
        self._tasks[task.number] = task
        for rank, slot in enumerate(slots):
            self._board.write(slot, 0, "start")
            self._board.set_waits(slot, False)
            if not self._processes.is_idle(slot):
                self._processes.start(slot)
            self._processes.tell(slot, Message(task.number, "start", rank, common))
        return task.number

    def answer(self, question: Message, value: Any) -> None:
        """Answer a question, if its task has not ended since."""
        if (task := self._tasks.get(question.task)) is not None:
            task.asked.discard(question.rank)
            self._processes.tell(
                task.slots[question.rank], Message(task.number, "answer", question.rank, value)
            )

    def stop(self, number: int, *, patience_s: float = STOP_S) -> None:
        """Ask a task's ranks to end after their step; those that have not in time are killed."""
        task = self._tasks.get(number)
        if task is None or task.is_stopped:
            return
        task.is_stopped, task.kill_at_s = True, time.monotonic() + patience_s
        self._processes.signal(_STOP_SIGNAL, [task.slots[rank] for rank in task.running])

    def wait(self, timeout_s: float, *, also: Sequence[int] = ()) -> list[Message]:
        """What happened, at once if something has, else within the timeout.

        also: descriptors; nothing happened, at once, when one of them can be read.
        """
        kills = [task.kill_at_s for task in self._tasks.values() if task.kill_at_s is not None]
        left_s = min([timeout_s, *(max(0.0, at_s - time.monotonic()) for at_s in kills)])
        places = {
            slot: (task, rank)
            for task in self._tasks.values()
            for rank, slot in enumerate(task.slots)
            if rank in task.running
        }
        arrived = self._processes.wait(list(places), min(left_s, _LOOK_S), also=also)
        self._look_for_hangs()
        return [
            message for slot, message in arrived if self._is_news(*places[slot], message)
        ] + self._ended()

    def _look_for_hangs(self) -> None:
        """Look at the ranks of each task, but not while one of them waits for whoever started it."""
        for task in self._tasks.values():
            if not (task.failures or task.asked):
                slots = [task.slots[rank] for rank in task.running]
                if (hang := task.watch.look(self._processes.pids(slots))) is not None:
                    task.failures[hang.rank] = hang

    def _is_news(self, task: _Task, rank: int, message: Message) -> bool:
        """Whether a message is for whoever started the task, and not of a rank's end."""
        if message.kind == "ended":
            task.failures.setdefault(
                rank, killed(rank, message.value, self._board.read(task.slots[rank]))
            )
        elif message.kind == "end" and message.failure is not None:
            task.failures[rank] = message.failure
        elif message.kind == "end":
            task.results[rank] = message.value
        else:
            if message.kind == "question":
                task.asked.add(rank)
            return True
        return False

    def _ended(self) -> list[Message]:
        """Tasks that are over, their slots freed. A rank that failed leaves a fresh process to the next task."""
        events = []
        for task in list(self._tasks.values()):
            if task.failures and task.running:
                knows_cause = any(not failure.heard for failure in task.failures.values())
                kill_at_s = time.monotonic() + (0.0 if knows_cause else _CAUSE_S)
                task.kill_at_s = min(task.kill_at_s or float("inf"), kill_at_s)
            if task.running and task.kill_at_s is not None and time.monotonic() >= task.kill_at_s:
                for rank in task.running:
                    self._processes.end(task.slots[rank])
                    if task.is_stopped:
                        task.results[rank] = None
                    else:
                        task.failures[rank] = killed(
                            rank, -signal.SIGKILL, self._board.read(task.slots[rank])
                        )
            if not task.running:
                events.append(self._end(task))
        return events

    def _end(self, task: _Task) -> Message:
        del self._tasks[task.number]
        if task.failures:
            for slot in task.slots:
                self._processes.end(slot)
        self._store(task.number).unlink(missing_ok=True)
        cause = cause_of(list(task.failures.values())) if task.failures else None
        return Message(task.number, "end", 0, task.results.get(0), cause)

    def _store(self, number: int) -> Path:
        return self._meetings / f"store-{number}"

    # --- In a rank ----------------------------------------------------------------------------------------------

    def _be_rank(self, slot: int, line: Line) -> None:
        from paceline.base.logs import redirect
        from paceline.launch.process.rank_process import set_up_device

        be_watched(self._board, slot)
        signal.signal(
            _STOP_SIGNAL, signal.SIG_IGN
        )  # one that comes when the training is already over
        if len(self.devices) > 1:
            close_connections()
        device = set_up_device(self.devices[slot], len(self.devices))
        output = redirect(None)
        while True:
            try:
                start = line.start()
            except (EOFError, OSError):
                return
            log = (
                Path(folder) / f"rank-{start.rank}.log"
                if (folder := start.value["log_dir"])
                else None
            )
            before, output = output, redirect(log)
            before.close()
            line.end(*self._run(slot, device, start, line, log, output))
            _let_go(device)

    def _run(
        self,
        slot: int,
        device: torch.device,
        start: Message,
        line: Line,
        log: Path | None,
        output: TextIO,
    ) -> tuple[Any, Failure | None]:
        from paceline.launch.process.rank_process import run_body, store_in

        rank, order = start.rank, start.value
        world_size = order["world_size"]
        context = RankContext(
            rank,
            world_size,
            world_size,
            device,
            None,
            self._board,
            slot,
            order["attempt"],
            secret=bytes.fromhex(order["secret"]),
            timeout_s=self._timeout_s,
            deaths=(0,) * world_size,
            is_watched=True,
        )
        outcome = run_body(
            lambda context: self._body(context, order["payload"], line),
            context,
            device=self.devices[slot],
            make_store=store_in(self._store(start.task), world_size),
            terminal=output,
            log=log,
            report=lambda failure: line.end(None, failure),
            fault_policy=FaultPolicy(uses_process_group=order["uses_process_group"]),
        )
        sys.stdout.flush()
        sys.stderr.flush()
        return outcome


def _let_go(device: torch.device) -> None:
    """Free what a task's model left in cycles, so that the next one starts with the whole device, and its own peak."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
