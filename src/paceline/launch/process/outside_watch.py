"""Watches the ranks of a host from outside of each, and names the one that the others wait for.

A rank that holds the interpreter in a native call, or is stopped, can't speak for itself. So nothing is asked of it:
its signs of life are in shared memory, the kernel says what its process does, and its Python stack is written by a
signal handler in C (faulthandler), which needs no lock of the interpreter.

The process that started the ranks looks. torchrun and Slurm start ranks themselves, and a process beside theirs would
outlive the rank that it came from, or be killed with it: there a rank of the host does, as long as its threads run (see
`watchdog.py`). On several hosts, each one tells the others what it saw.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import psutil

from paceline.base.errors import PeerLost
from paceline.base.user_code import is_users
from paceline.base.waiting import waiting
from paceline.launch.process.failure import Failure
from paceline.launch.process.heartbeats import Heartbeat, HeartbeatTable
from paceline.torch_private.data_loaders import FETCH, WORKER_LOOP

# Not the schedulers' SIGUSR1 and SIGUSR2. Realtime signals are Linux's; macOS ignores SIGINFO where nobody asks for it.
STACK_SIGNAL: int = signal.SIGRTMIN + 3 if hasattr(signal, "SIGRTMIN") else signal.SIGINFO  # type: ignore[attr-defined]
# How long to wait for the stacks. A rank that waits for a core writes its stack late.
_STACK_S, _STACK_POLL_S = 4.0, 0.01
# What the kernel says of a process that doesn't react. In the first three states it runs no signal handler.
_STATES = {
    psutil.STATUS_STOPPED: "its process is stopped, by SIGSTOP for example",
    psutil.STATUS_TRACING_STOP: "a debugger holds its process",
    psutil.STATUS_ZOMBIE: "its process has ended",
    psutil.STATUS_DISK_SLEEP: "its process waits in the kernel, for a disk for example",
}
_DUMB = [*_STATES][:3]
_PATIENCES = 3  # that ranks which compute nothing have while nobody waits
ANSWER_S = 3.0  # how long to wait for what other ranks or hosts say
STORE_S = 5.0  # and for the store, on top of it: one that lives in a stopped process never answers
_ASKED_S = 1.0  # between looks whether another host asks
_AWAY_S = 5.0  # without a look, of which there are two a second
_ASLEEP = 0.1  # of its silence in which a rank that does something computes at least
_COLLECTIVES = f"torch{os.sep}distributed{os.sep}"  # where the files of torch's collectives are
_FRAMES_OF_A_COLLECTIVE = 6  # how deep a collective is in them at most
# Where a rank waits for its loader workers.
_LOADER = str(Path("torch", "utils", "data", "dataloader.py"))
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank is, as others see it.

    is_silent: it has given no sign of life for the patience. is_asleep: it computed nothing meanwhile.
    reacts: its process wrote where its main thread is. state: why it does not, as far as it is known.
    waits: for other ranks. waits_for: a process that makes something of its data, in words. where: the user's line.
    """

    step: int = 0
    phase: str = "start"
    host: str = ""
    is_silent: bool = True
    is_asleep: bool = False
    is_stopped: bool = False
    reacts: bool = False
    state: str = ""
    waits: bool = False
    waits_for: str = ""
    where: str = ""
    stack: str = ""


T = TypeVar("T")
RankPositions = Mapping[int, RankPosition]


@dataclass
class _Silence:
    """Since a sign of life: when it was given, and how long its process's threads had waited for a core soon after,
    and how long it and its children had computed."""

    since_s: float
    delays_s: dict[str, float]
    computed_s: float


def be_watched(board: HeartbeatTable, slot: int) -> None:
    """In a rank's process, first of all: a signal leaves its stack in a file, and its main thread says if it waits."""
    faulthandler.register(STACK_SIGNAL, file=board.stack(slot), all_threads=False)
    waiting.tell = partial(board.set_waits, slot)
    board.set_process(slot, os.getpid())


class SeenByAll:
    """Tells the other hosts where the ranks of this one are, and hears of theirs, when a host asks: one whose ranks are
    silent.

    A host that is asked answers though its own ranks work, or they would be taken for silent. Hosts that ask at once
    do so in one round, and what was told in earlier rounds does not count.
    """

    def __init__(self, store: Any, world_size: int) -> None:
        self.store, self.world_size = store, world_size
        # The last round in which this host said where its ranks are, and the last one known.
        self._answered = self._known = within(STORE_S, self._latest) or 0
        self._looked_s, self._looking = -math.inf, threading.Thread()

    def _latest(self) -> int:
        return int(self.store.add("stuck", 0))

    def is_asked(self) -> bool:
        """Whether another host has asked and not been answered. A thread looks once a second, so that a store that is
        silent holds nobody up."""
        if not self._looking.is_alive() and time.monotonic() - self._looked_s >= _ASKED_S:
            self._looked_s = time.monotonic()
            self._looking = threading.Thread(target=self._look, name="paceline-ask", daemon=True)
            self._looking.start()
        return self._known > self._answered

    def _look(self) -> None:
        with suppress(RuntimeError):
            self._known = self._latest()

    def __call__(self, seen: RankPositions) -> RankPositions:
        """Return all ranks' positions. Ranks of which nobody says anything are silent; if the store gives no answer, of
        which nobody knows why, rank 0's are, which keeps it."""

        def ask() -> dict[int, RankPosition]:
            latest = self._latest()
            if latest <= self._answered:
                self.store.compare_set("stuck", str(latest), str(latest + 1))
                latest += 1
            self._answered = latest
            for rank, position in seen.items():
                self.store.set(f"stuck/{latest}/{rank}", json.dumps(asdict(position)))
            time.sleep(ANSWER_S)
            return {
                rank: RankPosition(**json.loads(self.store.get(f"stuck/{latest}/{rank}")))
                if self.store.check([f"stuck/{latest}/{rank}"])
                else RankPosition()
                for rank in range(self.world_size)
            }

        answers = within(ANSWER_S + STORE_S, ask)
        return {0: RankPosition(), **seen} if answers is None else answers


def within(limit_s: float | None, ask: Callable[[], T]) -> T | None:
    """What the store says, in as many seconds; None if the process that keeps it is gone or does not answer."""
    answers: list[T] = []

    def collect_answer() -> None:
        with suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=collect_answer, name="paceline-ask", daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else None


class OutsideWatch:
    """Looks at ranks when asked.

    ranks: of each slot of the board that is watched, the rank's number in the run, by which reports name it.
    patience_s: how long one may give no sign of life, beside the time in which it was ready to run and the machine gave
        it no core.
    sees_all: whether the others need all of these ranks. Else a rank that waits may wait for any other one.
    seen_by_all: what all hosts see of all ranks of the run; None if all of them are here.
    """

    def __init__(
        self,
        board: HeartbeatTable,
        ranks: Mapping[int, int],
        *,
        patience_s: float,
        sees_all: bool = True,
        seen_by_all: SeenByAll | None = None,
    ) -> None:
        self.board, self.ranks, self.patience_s = board, ranks, patience_s
        self.sees_all, self.seen_by_all = sees_all, seen_by_all
        for slot in ranks:
            board.stack(slot)  # before ranks are forked
        self._silences: dict[int, _Silence] = {}
        self._looked_s, self._awake_s = time.monotonic(), 0.0
        self._silent_in: list[
            tuple[int, str]
        ] = []  # step and phase, at each look at ranks that nobody waits for

    def look(self, pids: dict[int, int]) -> Failure | None:
        """The report of a hang, in the culprit's name; None while there is none. pids: of the slots that are watched.

        A hang is found if a rank that doesn't wait for others was silent for the patience, or all ranks wait. Where
        nobody waits for it, its place is told once, and it goes on, but not if it is stopped, or computes nothing: at
        once if it is alone, and after a few patiences if all ranks are silent. If nobody has looked for long, this
        process was stopped, and the ranks may have been, by Ctrl-Z for example: what they were silent until now does
        not count.
        """
        if time.monotonic() - self._looked_s > _AWAY_S:
            self._awake_s = time.monotonic()
        self._looked_s = time.monotonic()
        silent = {slot for slot, pid in pids.items() if self._silent_s(slot, pid) > self.patience_s}
        if not silent and not (self.seen_by_all and self.seen_by_all.is_asked()):
            return None
        seen = self._positions(pids, silent)
        if self.seen_by_all is not None:
            seen = self.seen_by_all(seen)
        reacting = [position for position in seen.values() if position.reacts]
        has_waiting = (
            not self.sees_all
            or (self.seen_by_all is None and len(pids) < len(self.ranks))
            or (len(seen) > 1 and _is_awaited(reacting))
        )
        is_everywhere = self.sees_all and all(
            position.reacts and position.waits and position.is_silent for position in seen.values()
        )
        concerned = {
            rank: position
            for rank, position in seen.items()
            if position.is_silent or (position.reacts and position.waits)
        }  # the others work
        dumb = [position for position in concerned.values() if not position.reacts]
        if not is_everywhere and not dumb and all(each.waits for each in concerned.values()):
            return None  # who waits, waits for a rank that works
        failure = hang_failure(concerned, timeout_s=self.patience_s)
        place = failure.step, failure.phase
        self._silent_in = [*self._silent_in, place] if place in self._silent_in else [place]
        is_long = len(self._silent_in) > (_PATIENCES if len(seen) > 1 else 0)
        if (
            has_waiting
            or any(position.is_stopped for position in dumb)
            or (is_long and all(each.is_asleep for each in seen.values() if each.is_silent))
        ):
            return failure
        self._awake_s = time.monotonic()
        if len(self._silent_in) == 1 and (self.seen_by_all is None or 0 in self.ranks.values()):
            tell_silence(failure)
        return None

    def _is_asleep(self, slot: int, pid: int) -> bool:
        """Whether a silent rank, and what works for it, computes nothing: it waits for what doesn't come. One that is
        ready to run computes, though a busy machine may give it no core for long."""
        return (
            _status(pid) != psutil.STATUS_RUNNING
            and _computed_s(pid) - self._silences[slot].computed_s < _ASLEEP * self.patience_s
        )

    def _silent_s(self, rank: int, pid: int) -> float:
        """How long a rank has given no sign of life without the machine's being the reason."""
        sign = self.board.read(rank)
        silent_s = time.monotonic() - max(sign.time_s, self._awake_s)
        if silent_s < self.patience_s / 8:  # as good as all the time
            return silent_s
        silence = self._silences.get(rank)
        if silence is None or silence.since_s != sign.time_s:
            silence = self._silences[rank] = _Silence(sign.time_s, delays_s(pid), _computed_s(pid))
        starved_s = max(
            (
                delay_s - silence.delays_s.get(thread, 0.0)
                for thread, delay_s in delays_s(pid).items()
            ),
            default=0.0,
        )
        return silent_s - starved_s

    def _positions(self, pids: dict[int, int], silent: set[int]) -> RankPositions:
        """Where each rank's main thread is.

        The signal may end a system call that a rank was blocked in, and so the hang; it is reported as it was before.
        """
        signs = {slot: self.board.read(slot) for slot in pids}
        return {
            self.ranks[slot]: self._position(slot, pids[slot], signs[slot], text, slot in silent)
            for slot, text in self._ask(pids).items()
        }

    def _ask(self, pids: dict[int, int]) -> dict[int, str]:
        """What the signal makes processes write, each into its rank's file; nothing of one that doesn't react."""
        asked = [rank for rank, pid in pids.items() if _writes_stacks(pid)]
        for rank, pid in pids.items():
            os.ftruncate(self.board.stack(rank), 0)
            if rank in asked:
                with suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
        until_s = time.monotonic() + _STACK_S
        texts = dict.fromkeys(pids, "")
        before: dict[int, str] = {}
        while (
            any(not texts[rank] and _status(pids[rank]) not in _DUMB for rank in asked)
            or texts != before
        ) and time.monotonic() < until_s:  # they come line by line
            time.sleep(_STACK_POLL_S)
            texts, before = {rank: self._text(rank) for rank in pids}, texts
        return texts

    def _text(self, rank: int) -> str:
        """What a rank's handler has written, if it is done."""
        text = os.pread(self.board.stack(rank), 2**16, 0).decode(errors="replace")
        return text if _FRAME.search(text) else ""

    def _position(
        self, slot: int, pid: int, sign: Heartbeat, text: str, is_silent: bool
    ) -> RankPosition:
        frames = _frames(text)
        stack = traceback.StackSummary.from_list(
            [(file, line, name, None) for file, line, name in reversed(frames)]
        )
        return RankPosition(
            sign.step,
            sign.phase,
            socket.gethostname(),
            is_silent,
            is_asleep=is_silent and self._is_asleep(slot, pid),
            is_stopped=_status(pid) == psutil.STATUS_STOPPED,
            reacts=bool(text),
            state="" if text else _STATES.get(_status(pid), ""),
            # On a GPU a collective returns at once, and the rank waits where it reads the result: in the reduce phase.
            waits=sign.phase == "reduce"
            or self.board.waits(slot)
            or _is_in_collective([file for file, _, _ in frames]),
            waits_for=self._busy_worker(slot, pid)
            if any(_LOADER in file for file, _, _ in frames[:9])
            else "",
            where=next((f"{file}:{line}" for file, line, _ in frames if is_users(file)), ""),
            stack="".join(stack.format()[-6:]),
        )

    def _busy_worker(self, rank: int, pid: int) -> str:
        """The first process that makes something of a rank's data, with its place; nothing where all of them idle, or
        no kernel says. As forks of the rank they have its handler, and its file."""
        with suppress(OSError):
            for worker in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
                if not _writes_stacks(worker):
                    continue
                text = self._ask({rank: worker})[rank]
                frames = takewhile(lambda frame: frame[2] != WORKER_LOOP, _frames(text))
                busy = [
                    f"at {file}:{line}"
                    for file, line, _ in frames
                    if FETCH in file or is_users(file)
                ]
                if busy or not text:
                    place = (
                        busy[0] if busy else _STATES.get(_status(worker)) or "which does not react"
                    )
                    return f"its loader worker (process {worker}), {place}"
        return ""


def _writes_stacks(pid: int) -> bool:
    """Whether the signal makes a process write its stack; another one would end by it. True where no kernel says."""
    try:
        caught = re.search(
            r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(errors="replace")
        )
    except OSError:
        return not Path("/proc/self/status").exists()
    return caught is not None and bool(int(caught[1], 16) >> STACK_SIGNAL - 1 & 1)


def _frames(text: str) -> list[tuple[str, int, str]]:
    """File, line and function of each frame that faulthandler wrote, the innermost first."""
    return [(match["file"], int(match["line"]), match["name"]) for match in _FRAME.finditer(text)]


def _is_in_collective(files: list[str]) -> bool:
    """Whether the innermost frames, the first ones, are in a collective of torch and not in what the user wrote."""
    for file in files[:_FRAMES_OF_A_COLLECTIVE]:
        if _COLLECTIVES in file:
            return True
        if is_users(file):
            return False
    return False


def _computed_s(pid: int) -> float:
    """How long a process and its children have had a core, or its main thread was ready to run and had none."""
    total_s = delays_s(pid).get(str(pid), 0.0)
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total_s += sum(each.cpu_times()[:4])
    return total_s


def delays_s(pid: int) -> dict[str, float]:
    """How long each thread of a process was ready to run and had to wait for a core; nothing where no kernel says."""
    delays_s: dict[str, float] = {}
    with suppress(OSError, ValueError, IndexError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            delays_s[thread.name] = 1e-9 * int((thread / "schedstat").read_text().split()[1])
    return delays_s


def _status(pid: int) -> str:
    """Of a process, in psutil's words; nothing of one that is gone."""
    with suppress(psutil.Error):
        return str(psutil.Process(pid).status())
    return ""


def _is_awaited(positions: Iterable[RankPosition]) -> bool:
    """Whether a rank waits, for another one or for a process that reads its data."""
    return any(position.waits or position.waits_for for position in positions)


def tell_silence(failure: Failure) -> None:
    """Ranks that nobody waits for go on, and may be slow."""
    what, at = failure.message.partition("\n")[0], f", at {failure.where}" if failure.where else ""
    print(
        f"warning: {what} in {Heartbeat(failure.step, failure.phase, 0.0)}{at}; nobody waits for it, so the run goes "
        f"on\n{failure.trace}",
        file=sys.stderr,
        flush=True,
    )


def hang_failure(positions: RankPositions, *, timeout_s: float) -> Failure:
    """The report of a hang, in the culprit's name, from where each rank is. A host whose ranks all work says nothing of
    them, so they are not named before one that is known to be stuck."""
    stuck = [rank for rank, each in positions.items() if each.reacts and not each.waits]
    silent = [r for r, each in positions.items() if not each.reacts and (each.host or not stuck)]
    waiting = [rank for rank, each in positions.items() if each.reacts and each.waits]
    culprit, trace = min(silent or stuck or waiting), ""
    position = positions[culprit]
    if silent:
        message = f"rank {listed(silent)} gave no sign of life for {timeout_s:g} s"
        if position.state:
            message += f" ({position.state})"
    elif stuck:
        message = (
            f"rank {listed(stuck)} did not reach the collective that the others wait for in {timeout_s:g} s"
            if waiting
            else f"rank {listed(stuck)} did not go on for {timeout_s:g} s"
        )
        trace = f"Stack of rank {culprit}:\n{position.stack.rstrip()}"
    else:
        steps = ", ".join(
            f"rank {rank}: step {each.step} ({each.phase})"
            for rank, each in sorted(positions.items())
        )
        message = f"all ranks wait in collectives that don't match for {timeout_s:g} s: {steps}"
    if position.waits_for:
        message += f"; rank {culprit} waits for {position.waits_for}"
    if waiting and (silent or stuck):
        message += f"; rank {listed(waiting)} waited for it"
    return Failure(
        culprit,
        position.host,
        PeerLost.__name__,
        message,
        PeerLost.exit_code,
        heard=False,
        step=position.step,
        phase=position.phase,
        where=position.where,
        trace=trace,
        time_s=time.time(),
        hint="--timeout SECONDS allows longer pauses",
    )


def listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
