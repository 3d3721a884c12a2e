"""Watches the ranks of this host from the process that started them, and names the one that the others wait for.

A rank that holds the interpreter in a native call, or is stopped, can't speak for itself. So nothing is asked of it:
its signs of life are in shared memory, the kernel says what its process does, and its Python stack is written by a
signal handler in C (faulthandler), which needs no lock of the interpreter.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from paceline.base.user_code import is_users
from paceline.launch.process.failure import Failure
from paceline.launch.process.heartbeats import Heartbeat, HeartbeatTable
from paceline.launch.process.memory_files import memory_file
from paceline.launch.process.watchdog import (
    ASLEEP,
    COLLECTIVES,
    FRAMES_OF_A_COLLECTIVE,
    LOADER,
    delays_s,
    hang_failure,
    is_awaited,
    tell_silence,
)
from paceline.torch_private.data_loaders import FETCH, WORKER_LOOP

# Not the schedulers' SIGUSR1 and SIGUSR2. Realtime signals are Linux's; macOS ignores SIGINFO where nobody asks for it.
STACK_SIGNAL: int = signal.SIGRTMIN + 3 if hasattr(signal, "SIGRTMIN") else signal.SIGINFO  # type: ignore[attr-defined]
# How long to wait for the stacks. A rank that waits for a core writes its stack late.
_STACK_S, _STACK_POLL_S = 4.0, 0.01
_DUMB = {*"TtZ"}  # states in which a process runs no signal handler
_PATIENCES = 3  # that ranks which compute nothing have while nobody waits
_AWAY_S = 5.0  # without a look, of which there are two a second
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass
class _Silence:
    """Since a sign of life: when it was given, and how long its process's threads had waited for a core soon after,
    and how long it and its children had computed."""

    since_s: float
    delays_s: dict[str, float]
    computed_s: float


class OutsideWatch:
    """Looks at ranks when asked.

    patience_s: how long one may give no sign of life, beside the time in which it was ready to run and the machine gave
        it no core.
    sees_all: whether all ranks of the run are on this host. Else ranks that all wait may wait for one elsewhere.
    """

    def __init__(
        self, board: HeartbeatTable, num_ranks: int, *, patience_s: float, sees_all: bool = True
    ) -> None:
        self.board, self.patience_s, self.sees_all = board, patience_s, sees_all
        self._first_rank = 0
        self._stacks = [memory_file("paceline-stack") for _ in range(num_ranks)]
        for stack in self._stacks:
            fcntl.fcntl(
                stack, fcntl.F_SETFL, os.O_APPEND
            )  # a rank writes at the end, which is moved here
        self._silences: dict[int, _Silence] = {}
        self._looked_s, self._awake_s = time.monotonic(), 0.0
        self._silent_in: list[
            tuple[int, str]
        ] = []  # step and phase, at each look at ranks that nobody waits for

    def close(self) -> None:
        for descriptor in self._stacks:
            os.close(descriptor)

    def number_from(self, first_rank: int) -> None:
        """Reports name this host's ranks by their numbers in the run, of which this is the first."""
        self._first_rank = first_rank

    def be_watched(self, rank: int) -> None:
        """In the rank's process, first of all: the signal leaves its stack in a file."""
        faulthandler.register(STACK_SIGNAL, file=self._stacks[rank], all_threads=False)

    def look(self, pids: dict[int, int]) -> Failure | None:
        """The report of a hang, in the culprit's name; None while there is none. pids: of the ranks that are watched.

        A hang is found if a rank that doesn't wait for others was silent for the patience, or all ranks wait. Where
        nobody waits for it, its place is told once, and it goes on, but not if it is stopped, or computes nothing: at
        once if it is alone, and after a few patiences if all ranks are silent. If nobody has looked for long, this
        process was stopped, and the ranks may have been, by Ctrl-Z for example: what they were silent until now does
        not count.
        """
        if time.monotonic() - self._looked_s > _AWAY_S:
            self._awake_s = time.monotonic()
        self._looked_s = time.monotonic()
        silent = [rank for rank, pid in pids.items() if self._silent_s(rank, pid) > self.patience_s]
        if not silent:
            return None
        positions = self._positions(pids)
        reacting = {rank: position for rank, position in positions.items() if position is not None}
        has_waiting = (
            not self.sees_all
            or len(pids) < len(self._stacks)
            or (len(pids) > 1 and is_awaited(reacting.values()))
        )
        is_everywhere = (
            self.sees_all
            and len(reacting) == len(silent) == len(pids)
            and all(position["waits"] for position in reacting.values())
        )
        dumb = [rank for rank in silent if rank not in reacting]
        reacting = {
            rank: position
            for rank, position in reacting.items()
            if rank in silent or position["waits"]
        }  # the others work
        if (
            not is_everywhere
            and not dumb
            and all(position["waits"] for position in reacting.values())
        ):
            return None  # who waits, waits for a rank that works
        failure = self._report(reacting, dumb, pids)
        place = failure.step, failure.phase
        self._silent_in = [*self._silent_in, place] if place in self._silent_in else [place]
        is_long = len(self._silent_in) > (_PATIENCES if len(self._stacks) > 1 else 0)
        if (
            has_waiting
            or any(is_stopped(pids[rank]) for rank in dumb)
            or (is_long and all(self._is_asleep(rank, pids[rank]) for rank in silent))
        ):
            return failure
        self._awake_s = time.monotonic()
        if len(self._silent_in) == 1:
            tell_silence(failure)
        return None

    def _is_asleep(self, rank: int, pid: int) -> bool:
        """Whether a silent rank, and what works for it, computes nothing: it waits for what doesn't come. One that is
        ready to run computes, though a busy machine may give it no core for long."""
        return (
            _state_letter(pid) != "R"
            and _computed_s(pid) - self._silences[rank].computed_s < ASLEEP * self.patience_s
        )

    def _report(
        self, reacting: dict[int, dict[str, Any]], dumb: list[int], pids: dict[int, int]
    ) -> Failure:
        world_size = len(pids)
        first = self._first_rank
        failure = hang_failure(
            {first + rank: position for rank, position in reacting.items()},
            world_size=world_size,
            rank=first + next(iter(reacting), 0),
            timeout_s=self.patience_s,
            silent=[first + rank for rank in dumb],
            states={first + rank: _state(pids[rank]) for rank in dumb},
        )
        if failure.rank - first in reacting:
            return failure
        sign = self.board.read(failure.rank - first)
        return replace(failure, host=socket.gethostname(), step=sign.step, phase=sign.phase)

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

    def _positions(self, pids: dict[int, int]) -> dict[int, dict[str, Any] | None]:
        """Where each rank's main thread is; None for one that doesn't react to a signal.

        The signal may end a system call that a rank was blocked in, and so the hang; it is reported as it was before.
        """
        signs = {rank: self.board.read(rank) for rank in pids}
        return {
            rank: self._position(rank, pids[rank], signs[rank], text) if text else None
            for rank, text in self._ask(pids).items()
        }

    def _ask(self, pids: dict[int, int]) -> dict[int, str]:
        """What the signal makes processes write, each into its rank's file; nothing of one that doesn't react."""
        for rank, pid in pids.items():
            os.ftruncate(self._stacks[rank], 0)
            with suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)
        until_s = time.monotonic() + _STACK_S
        texts = dict.fromkeys(pids, "")
        before: dict[int, str] = {}
        while (
            any(not text and _state_letter(pids[rank]) not in _DUMB for rank, text in texts.items())
            or texts != before
        ) and time.monotonic() < until_s:  # they come line by line
            time.sleep(_STACK_POLL_S)
            texts, before = {rank: self._text(rank) for rank in pids}, texts
        return texts

    def _text(self, rank: int) -> str:
        """What a rank's handler has written, if it is done."""
        text = os.pread(self._stacks[rank], 2**16, 0).decode(errors="replace")
        return text if _FRAME.search(text) else ""

    def _position(self, rank: int, pid: int, sign: Heartbeat, text: str) -> dict[str, Any]:
        frames = _frames(text)
        # On a GPU a collective returns at once, and the rank waits where it reads the result: in the reduce phase.
        waits = (
            sign.phase == "reduce"
            or self.board.waits(rank)
            or _is_in_collective([file for file, _, _ in frames])
        )
        where = next((f"{file}:{line}" for file, line, _ in frames if is_users(file)), "")
        stack = traceback.StackSummary.from_list(
            [(file, line, name, None) for file, line, name in reversed(frames)]
        )
        return {
            "step": sign.step,
            "phase": sign.phase,
            "waits": waits,
            "where": where,
            "host": socket.gethostname(),
            "stack": "".join(stack.format()[-6:]),
            "waits_for": self._busy_worker(rank, pid)
            if any(LOADER in file for file, _, _ in frames[:9])
            else "",
        }

    def _busy_worker(self, rank: int, pid: int) -> str:
        """The first process that makes something of a rank's data, with its place; nothing where all of them idle, or
        no kernel says. As forks of the rank they have its handler, and its file."""
        with suppress(OSError):
            for worker in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
                caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{worker}/status").read_text())
                if caught is None or not int(caught[1], 16) >> STACK_SIGNAL - 1 & 1:
                    continue  # the signal would end it
                text = self._ask({rank: worker})[rank]
                frames = takewhile(lambda frame: frame[2] != WORKER_LOOP, _frames(text))
                busy = [
                    f"at {file}:{line}"
                    for file, line, _ in frames
                    if FETCH in file or is_users(file)
                ]
                if busy or not text:
                    place = busy[0] if busy else _state(worker) or "which does not react"
                    return f"its loader worker (process {worker}), {place}"
        return ""


def _frames(text: str) -> list[tuple[str, int, str]]:
    """File, line and function of each frame that faulthandler wrote, the innermost first."""
    return [(match["file"], int(match["line"]), match["name"]) for match in _FRAME.finditer(text)]


def _is_in_collective(files: list[str]) -> bool:
    """Whether the innermost frames, the first ones, are in a collective of torch and not in what the user wrote."""
    for file in files[:FRAMES_OF_A_COLLECTIVE]:
        if COLLECTIVES in file:
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


def is_stopped(pid: int) -> bool:
    """Whether a process does nothing until another one lets it go on."""
    return _state_letter(pid) == "T"


def _state(pid: int) -> str:
    """What the kernel says of a process that doesn't react."""
    return {
        "T": "its process is stopped, by SIGSTOP for example",
        "t": "a debugger holds its process",
        "D": "its process waits in the kernel, for a disk for example",
        "Z": "its process has ended",
    }.get(_state_letter(pid), "")


def _state_letter(pid: int) -> str:
    """Of a process, as proc_pid_stat(5) has it; nothing where no kernel says."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
