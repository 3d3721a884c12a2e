"""Operators are timed in a fork for each rank, all ranks at the same ones, in turns as in a step.

An operator that is called again and again is faster than in a step, where others have filled a core's caches of code
and pages meanwhile. Those of a small perceptron took 0.86 ms on a core where each was repeated alone, 1.15 ms in
the order of the step, and 1.17 ms in turns of 32; those of a ConvNet took 9.6, 12.2 and 11.9 ms.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from paceline.base.fork import die_with, in_a_fork
from paceline.model.cost.arena import Arena, prepared
from paceline.model.cost.op_calls import MIB, OperatorCall

TURNS, TURNS_BYTES = (
    32,
    256 * MIB,
)  # as many operators take turns, as far as their results are not larger together
BRIEF_S = 3e-4  # operators that take less are called between others even when they are timed
MEASURED_S = 0.004  # of an operator's calls
FEWEST, MOST = 5, 16  # of them
ALIKE = 0.05  # by which the two fastest calls may differ, as a part, where nothing disturbs them
SLOW_S, LONGEST_S = (
    0.03,
    0.15,
)  # of an operator's calls on one thread, and on several, which are disturbed more easily
BUDGET_S = 20.0  # of a session; what is left is priced by what it computes and moves
MOST_CRASHES = 5
WAIT_S, POLL_S = (
    0.5,
    1e-4,
)  # at most for the other ranks before operators take turns, for each of them; between looks
CANT = -1.0  # seconds of an operator that failed
# Of a session's time that its thread has a core: 0.93 to 1.0 on two quiet cores, and 0.2 to 0.7 beside other work.
QUIET_SHARE = 0.85


class TimedCalls(NamedTuple):
    """seconds: of each call; CANT of one that fails, None of one for which no time was left. cpu_share: the part of the
    time for which the thread that timed them had a core."""

    seconds: list[float | None]
    cpu_share: float

    @property
    def is_quiet(self) -> bool:
        """Whether no other work had the cores."""
        return self.cpu_share >= QUIET_SHARE


def session(
    calls: Sequence[OperatorCall],
    processes: int,
    threads: int,
    *,
    beside: Sequence[OperatorCall] = (),
    keeps_heap: bool = True,
    budget_s: float = BUDGET_S,
) -> TimedCalls:
    """Time operators where so many processes with so many threads call them.

    beside: operators that take turns with them where they are few, and are not timed.
    """
    import paceline.launch.process.rank_process  # noqa: F401  here, so that not every fork loads it

    board = _Board(len(calls), processes)
    deadline_s = time.monotonic() + budget_s
    set_up = partial(_set_up, threads, keeps_heap=keeps_heap)
    others = list(beside[: max(0, TURNS - len(calls))])
    for _ in range(MOST_CRASHES):
        try:
            in_a_fork(
                partial(_lead, [*calls, *others], board, set_up, deadline_s),
                timeout_s=budget_s + 60,
            )
            break
        except RuntimeError:  # a kernel may end its process
            if board.at >= len(calls):
                others = []
            else:
                board.seconds[board.at] = CANT
    return TimedCalls(
        [None if math.isnan(seconds) else seconds for seconds in board.seconds], board.cpu_share
    )


class _Board:
    """Memory that ranks share: seconds of each call, which operators take turns, and who is ready for them.

    at: the call that the lead is at.
    """

    def __init__(self, num_calls: int, processes: int) -> None:
        shared = memoryview(mmap.mmap(-1, 8 * (num_calls + processes + 7))).cast("d")
        self.seconds, self.ready = shared[:num_calls], shared[num_calls:-7]
        # The turns that are over, the call that the lead is at, its time; and the newest turns: from which call to
        # which, and their number.
        self._over, self._at, self._lead_s, self._turns = (
            shared[-7:-6],
            shared[-6:-5],
            shared[-5:-3],
            shared[-3:],
        )
        for k in range(num_calls):
            self.seconds[k] = math.nan

    @property
    def at(self) -> int:
        return int(self._at[0])

    def is_at(self, number: int) -> None:
        self._at[0] = number

    @property
    def cpu_share(self) -> float:
        """The part of the lead's time for which it had a core."""
        wall_s, cpu_s = self._lead_s
        return cpu_s / wall_s if wall_s else 1.0

    def account(self, wall_s: float, cpu_s: float) -> None:
        """What the lead took for some calls."""
        self._lead_s[0] += wall_s
        self._lead_s[1] += cpu_s

    def is_missing(self, number: int) -> bool:
        """Whether the call is to be timed, or takes turns with those that are."""
        return number >= len(self.seconds) or math.isnan(self.seconds[number])

    def begin(self, first: int, end: int) -> None:
        """The lead waits until the others have prepared these calls, or can't."""
        self._turns[0], self._turns[1] = first, end
        self._turns[2] += 1
        deadline_s = time.perf_counter() + WAIT_S * (end - first)
        while (
            min(self.ready[1:], default=math.inf) < self._turns[2]
            and time.perf_counter() < deadline_s
        ):
            pass

    def end(self) -> None:
        self._over[0] = self._turns[2]

    def next_turns(self, before: float) -> tuple[int, int, float]:
        """Wait for turns after those of a number: from which call to which, and their number."""
        while self._turns[2] <= before:
            time.sleep(POLL_S)
        return int(self._turns[0]), int(self._turns[1]), self._turns[2]

    def are_over(self, turns: float) -> bool:
        return self._over[0] >= turns


def _lead(
    calls: Sequence[OperatorCall], board: _Board, set_up: Callable[[], Arena], deadline_s: float
) -> None:
    """Time operators, beside ranks that call the same ones. set_up: this process, as a rank is."""
    import torch

    parent, peers, before = os.getpid(), [], torch.get_num_threads()
    for rank in range(1, len(board.ready)):
        pid = os.fork()
        if pid == 0:
            try:
                die_with(parent)
                _follow(calls, board, set_up, rank)
            finally:
                os._exit(0)
        peers.append(pid)
    try:
        arena, first = set_up(), 0
        most = math.ceil(len(calls) / math.ceil(len(calls) / TURNS))  # turns of alike length
        while first < len(board.seconds) and time.monotonic() < deadline_s:
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            turns, end = _next_turns(calls, first, most, board, arena)
            board.begin(first, end)
            timing = Timing(len(board.seconds), deadline_s, board.is_at)
            for number, seconds in timing.seconds(turns, torch.get_num_threads()).items():
                board.seconds[number] = seconds
            board.end()
            board.account(time.perf_counter() - began_s, time.thread_time() - began_cpu_s)
            first = end
            arena.mend()
    finally:
        torch.set_num_threads(
            before
        )  # where this is no fork, but a process that was forked for more than this
        torch.set_grad_enabled(True)
        for pid in peers:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _next_turns(
    calls: Sequence[OperatorCall], first: int, most: int, board: _Board, arena: Arena
) -> tuple[dict[int, Callable[[], object]], int]:
    """The calls from some number on that take turns, at most so many, and the number after them."""
    turns: dict[int, Callable[[], object]] = {}
    number, held_bytes = first, 0
    while number < len(calls) and len(turns) < most and held_bytes < TURNS_BYTES:
        if board.is_missing(number):
            board.is_at(number)
            try:
                turns[number], num_bytes = prepared(calls[number], arena)
                held_bytes += num_bytes
                turns[number]()
            except Exception:
                turns.pop(number, None)
                if number < len(board.seconds):
                    board.seconds[number] = CANT
        number += 1
    return turns, number


def _follow(
    calls: Sequence[OperatorCall], board: _Board, set_up: Callable[[], Arena], rank: int
) -> None:
    """Call the operators that take turns until the lead has timed them."""
    arena, number = set_up(), 0.0
    while True:
        first, end, number = board.next_turns(number)
        turns = []
        for at in filter(board.is_missing, range(first, end)):
            with suppress(Exception):
                turns.append(prepared(calls[at], arena)[0])
        board.ready[rank] = number
        while not board.are_over(number):
            for again in turns:
                with suppress(Exception):
                    again()
                if board.are_over(number):
                    break
        arena.mend()


def _set_up(threads: int, *, keeps_heap: bool) -> Arena:
    import torch

    from paceline.launch.process.malloc import set_up_heap

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    set_up_heap(keep=keeps_heap)
    return Arena()


@dataclass(frozen=True)
class Timing:
    """Times operators that take turns; they have numbers.

    num_timed: operators from this number on are only called between the others.
    deadline_s: on the monotonic clock; what was called less than twice by then is not timed.
    is_at: told which is called.
    """

    num_timed: int
    deadline_s: float = math.inf
    is_at: Callable[[int], None] = lambda number: None

    def seconds(self, turns: Mapping[int, Callable[[], object]], threads: int) -> dict[int, float]:
        """On one thread what the thread itself was busy counts; several are never slower than one, but where others are
        in their way."""
        import torch

        if threads == 1:
            return self._in_turns(turns, time.thread_time, SLOW_S)
        torch.set_num_threads(1)
        alone = self._in_turns(turns, time.thread_time, SLOW_S)
        torch.set_num_threads(threads)
        together = self._in_turns(turns, time.perf_counter, LONGEST_S)
        return {
            number: CANT if CANT in (seconds, together[number]) else min(seconds, together[number])
            for number, seconds in alone.items()
            if number in together
        }

    def _in_turns(
        self, turns: Mapping[int, Callable[[], object]], clock: Callable[[], float], slow_s: float
    ) -> dict[int, float]:
        """Of some calls, as a quarter of them take at most: others that use the machine make the rest slower. Of few
        calls the fastest counts, once another one is nearly as fast. slow_s: of an operator's calls, after which it is
        not called for the sake of more."""
        times: dict[int, list[float]] = {number: [] for number in turns if number < self.num_timed}
        brief = {number for number in turns if number >= self.num_timed}
        failed: set[int] = set()

        def is_timed(number: int) -> bool:
            return (
                number in times and number not in failed and not _are_enough(times[number], slow_s)
            )

        while any(map(is_timed, times)) and time.monotonic() < self.deadline_s:
            for number, again in turns.items():
                counts = is_timed(number)
                if number in failed or not (counts or number in brief):
                    continue
                self.is_at(number)
                try:
                    began_s = clock()
                    again()
                    seconds = clock() - began_s
                except Exception:
                    failed.add(number)
                    continue
                if counts:
                    times[number].append(seconds)
                (brief.add if seconds < BRIEF_S else brief.discard)(number)
        return {
            number: CANT if number in failed else _typical(of_one)
            for number, of_one in times.items()
            if number in failed or len(of_one) > 1
        }


def _typical(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=4)[0] if len(times) > FEWEST else min(times)


def _are_enough(times: Sequence[float], slow_s: float) -> bool:
    if len(times) < 2:
        return False
    if len(times) < FEWEST:
        return sum(times) >= slow_s and _are_alike(times)
    return len(times) >= min(MOST, MEASURED_S / times[0]) or sum(times) >= slow_s


def _are_alike(times: Sequence[float]) -> bool:
    """Whether two calls are as fast as each other, and no call is faster."""
    fastest, next_s = sorted(times)[:2]
    return next_s <= (1 + ALIKE) * fastest
