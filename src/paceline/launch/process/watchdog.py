"""Ends a run whose ranks wait for each other, and names the rank they wait for.

Each rank watches itself from a thread outside the collectives. If its main thread has shown no sign of life for the
timeout, it tells the others where it is: waiting in a collective, or stuck in its own code. The culprit is the rank
that is stuck in its own code, or that says nothing at all.

If a rank is known to have died, the others end some seconds later even if their main threads don't notice: a collective
of NCCL never returns then.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, TypeVar

from paceline.base.errors import PacelineError, PeerLost
from paceline.base.user_code import is_users
from paceline.base.waiting import waiting
from paceline.launch.hosts.liveness import silence_s
from paceline.launch.process.context import RankContext
from paceline.launch.process.failure import Failure, different_verbs, failure_of
from paceline.launch.process.heartbeats import Heartbeat

T = TypeVar("T")

_ANSWER_S = 3.0  # how long to wait for what the other ranks say
_POLL_S = 0.02  # between looks for a word that a rank died, which makes what others say unnecessary
_STORE_S = 5.0  # and for the store, on top of it: one that lives in a stopped process never answers
_AFTER_LOSS = "look at the last lines of its log; --resume goes on from the last checkpoint"
COLLECTIVES = f"torch{os.sep}distributed{os.sep}"  # where the files of torch's collectives are
LOADER = str(
    Path("torch", "utils", "data", "dataloader.py")
)  # where a rank waits for its loader workers
_ANSWERS = str(Path("paceline", "launch", "messages.py"))  # where a rank waits for who started it
ASLEEP = 0.1  # of its silence in which a rank that does something computes at least
FRAMES_OF_A_COLLECTIVE = 6  # how deep a collective is in them at most


class Watchdog:
    """Watches this rank's main thread while the block runs.

    On a hang `report` is given the failure, and the process leaves at once with its exit code: its main thread
    can't.
    """

    def __init__(
        self, context: RankContext, *, timeout_s: float, report: Callable[[Failure], None]
    ) -> None:
        self.context, self.timeout_s, self.report = context, timeout_s, report
        self.done, self.awake_s = (
            threading.Event(),
            0.0,
        )  # what ranks were silent before does not count
        self.silent_since_s = self.computed_s = (
            0.0  # of the last sign of life, and what was computed until then
        )
        self.thread = threading.Thread(target=self._watch, name="paceline-watch", daemon=True)

    def __enter__(self) -> Watchdog:
        if not self.context.is_watched:
            self.thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.done.set()

    def _watch(self) -> None:
        while not self.done.wait(min(1.0, self.timeout_s / 4)):
            if self.silent_since_s != self.context.sign.time_s:
                self.silent_since_s, self.computed_s = self.context.sign.time_s, _computed_s()
            if self.context.unreachable:
                failure = self._silence(self.context.unreachable[0])
            elif self.context.lost:
                self.done.wait(_ANSWER_S)  # the main thread may hear of it itself, and say more
                failure = self._loss()
            elif (
                time.monotonic() - max(self.context.sign.time_s, self.awake_s) > self.timeout_s
                and (hang := self._ask_around()) is not None
            ):
                failure = hang
            else:
                continue
            if not self.done.is_set():
                self.report(failure)
                os._exit(failure.exit_code)

    def _loss(self) -> Failure:
        """The report of a rank that can't go on without one that died."""
        gone = self.context.lost[:1]
        return _loss(self.context, gone, "its process or its host ended")

    def _silence(self, lost: int) -> Failure:
        """The report of a rank whose host gave no answer, which nobody else can give."""
        return replace(
            _loss(self.context, [lost], ""),
            message=f"it can't be reached: its host gave no answer for {silence_s(self.timeout_s):g} s",
            hint="is the host down, or its network? --resume goes on from the last checkpoint",
            heard=False,
        )

    def _ask_around(self) -> Failure | None:
        """Say where this rank is, hear where the others are, and name the culprit. None where nobody waits: rank 0
        tells of that."""
        store, rank, world_size = self.context.store, self.context.rank, self.context.world_size
        position = self._position()
        if store is None:
            return self._alone(position)

        def ask() -> dict[int, dict[str, Any]]:
            store.set(f"stuck/{rank}", json.dumps(position))
            time.sleep(_ANSWER_S)
            return {
                r: json.loads(store.get(f"stuck/{r}"))
                for r in range(world_size)
                if store.check([f"stuck/{r}"])
            }

        positions = within(_ANSWER_S + _STORE_S if rank else None, ask)
        if positions is None:  # rank 0 keeps the store; of the others nothing is known
            positions = {rank: position}
            silent = [0]
        else:
            silent = [r for r in range(world_size) if r not in positions]
        failure = hang_failure(
            positions, world_size=world_size, rank=rank, timeout_s=self.timeout_s, silent=silent
        )
        if failure.rank in silent:  # it said nothing of itself
            return _as_seen(failure, self.context)
        if is_awaited(positions.values()):
            return failure
        self.awake_s = time.monotonic()
        if rank == 0:
            tell_silence(failure)
        return None

    def _alone(self, position: dict[str, Any]) -> Failure | None:
        """The report of an only rank that computes nothing; one that computes is told of."""
        if position["waits"] or active_children() or _ANSWERS in position["stack"]:
            return None
        failure = hang_failure(
            {self.context.rank: position},
            world_size=1,
            rank=self.context.rank,
            timeout_s=self.timeout_s,
        )
        if _computed_s() - self.computed_s < ASLEEP * self.timeout_s:
            return failure
        self.awake_s = time.monotonic()
        tell_silence(failure)
        return None

    def _position(self) -> dict[str, Any]:
        thread = threading.main_thread().ident or 0
        frame = sys._current_frames().get(thread)
        sign = self.context.sign
        stack = traceback.format_stack(frame) if frame else []
        # On a GPU a collective returns at once, and the rank waits where it reads the result: in the reduce phase.
        waits = sign.phase == "reduce" or thread in waiting or is_in_collective(frame)
        return {
            "step": sign.step,
            "phase": sign.phase,
            "waits": waits,
            "where": _user_place(frame),
            "host": os.uname().nodename,
            "stack": "".join(stack[-6:]),
            "waits_for": f"its loader workers (processes {_listed([each.pid or 0 for each in active_children()])})"
            if any(LOADER in line for line in stack[-9:])
            else "",
        }


def is_awaited(positions: Iterable[dict[str, Any]]) -> bool:
    """Whether a rank waits, for another one or for a process that reads its data."""
    return any(position["waits"] or position["waits_for"] for position in positions)


def _computed_s() -> float:
    """How long this process has computed, or its main thread was ready to and the machine gave it no core."""
    return time.process_time() + delays_s(os.getpid()).get(str(os.getpid()), 0.0)


def delays_s(pid: int) -> dict[str, float]:
    """How long each thread of a process was ready to run and had to wait for a core; nothing where no kernel says."""
    delays_s: dict[str, float] = {}
    with suppress(OSError, ValueError, IndexError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            delays_s[thread.name] = 1e-9 * int((thread / "schedstat").read_text().split()[1])
    return delays_s


def tell_silence(failure: Failure) -> None:
    """Ranks that nobody waits for go on, and may be slow."""
    what, at = failure.message.partition("\n")[0], f", at {failure.where}" if failure.where else ""
    print(
        f"warning: {what} in {Heartbeat(failure.step, failure.phase, 0.0)}{at}; nobody waits for it, so the run goes "
        f"on\n{failure.trace}",
        file=sys.stderr,
        flush=True,
    )


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


def is_in_collective(frame: FrameType | None) -> bool:
    """Whether the innermost frames of a stack are in a collective of torch, and not in what the user wrote."""
    depth = 0
    while frame is not None and depth < FRAMES_OF_A_COLLECTIVE:
        if COLLECTIVES in frame.f_code.co_filename:
            return True
        if is_users(frame.f_code.co_filename):
            return False
        frame, depth = frame.f_back, depth + 1
    return False


def _user_place(frame: FrameType | None) -> str:
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def hang_failure(
    positions: dict[int, dict[str, Any]],
    *,
    world_size: int,
    rank: int,
    timeout_s: float,
    silent: list[int] | None = None,
    states: Mapping[int, str] = MappingProxyType({}),
) -> Failure:
    """The report of a hang, in the culprit's name, from what each rank said of itself; `rank` writes it.

    silent: ranks that gave no answer; by default all that are not in `positions`. states: what is known of those.
    """
    silent = [r for r in range(world_size) if r not in positions] if silent is None else silent
    stuck = [r for r, position in positions.items() if not position["waits"]]
    waiting = [r for r, position in positions.items() if position["waits"]]
    culprit, trace = rank, ""
    if silent:
        culprit = silent[0]
        message = f"rank {_listed(silent)} gave no sign of life for {timeout_s:g} s"
        if states.get(culprit):
            message += f" ({states[culprit]})"
    elif stuck:
        culprit = stuck[0]
        message = (
            f"rank {_listed(stuck)} did not reach the collective that the others wait for in {timeout_s:g} s"
            if waiting
            else f"rank {_listed(stuck)} did not go on for {timeout_s:g} s"
        )
        trace = f"Stack of rank {culprit}:\n{positions[culprit]['stack'].rstrip()}"
    else:
        steps = ", ".join(
            f"rank {r}: step {position['step']} ({position['phase']})"
            for r, position in sorted(positions.items())
        )
        message = f"all ranks wait in collectives that don't match for {timeout_s:g} s: {steps}"
    if worker := positions.get(culprit, {}).get("waits_for"):
        message += f"; rank {culprit} waits for {worker}"
    if waiting and (silent or stuck):
        message += f"; rank {_listed(waiting)} waited for it"
    position = positions.get(culprit, {"step": 0, "phase": "start", "where": "", "host": ""})
    return Failure(
        culprit,
        position["host"],
        PeerLost.__name__,
        message,
        PeerLost.exit_code,
        heard=False,
        step=position["step"],
        phase=position["phase"],
        where=position["where"],
        trace=trace,
        time_s=time.time(),
        hint="--timeout SECONDS allows longer pauses",
    )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def explained(failure: Failure, context: RankContext) -> Failure:
    """What a rank that fell with others can say of the cause, where ranks called different verbs."""
    if context.slot != context.rank or not failure.heard:  # the table's rows are not ranks
        return failure
    mismatch = context.board.verbs.mismatch(context.slot, context.sign.step)
    return different_verbs(context.rank, mismatch, context.sign) if mismatch else failure


def peer_loss(context: RankContext, error: BaseException) -> Failure:
    """The report of a rank whose collective broke: names the ranks that no longer answer.

    Which ranks died is known after a moment, or else every rank that is still there says so in the store, and who stays
    silent is gone.
    """
    failure = failure_of(error, rank=context.rank, sign=context.sign)
    store = context.store
    if store is None or not failure.heard:
        return failure

    def ask() -> list[int]:
        store.set(f"here/{context.rank}", "1")
        until_s = time.monotonic() + _ANSWER_S
        while not context.dead and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return context.dead[:1] or [
            r for r in range(context.world_size) if not store.check([f"here/{r}"])
        ]

    silent = within(_ANSWER_S + _STORE_S, ask)  # None: the store lived in the process that died
    gone = context.dead[:1] or silent
    if not gone:
        return failure
    # A torn connection says no more than that. What a peer sent wrongly says more.
    why = f" ({error.args[0]})" if isinstance(error, PacelineError) and error.args else ""
    failure = _loss(context, gone, "it closed its connections")
    return replace(failure, message=failure.message + why)


def _loss(context: RankContext, gone: list[int], how: str) -> Failure:
    """The report of a rank that can't go on without others, in the name of the first of them."""
    error = PeerLost(
        f"rank {_listed(gone)} is gone: {how} while rank {context.rank} was in {context.sign}",
        hint=_AFTER_LOSS,
        heard=True,
        rank=gone[0],
    )
    return _as_seen(failure_of(error, rank=context.rank, sign=context.sign), context)


def _as_seen(failure: Failure, context: RankContext) -> Failure:
    """The report of a rank that made none, with its host and its last sign of life."""
    sign = context.sign_of(failure.rank)
    host = context.hosts[failure.rank] if context.hosts else os.uname().nodename
    return replace(failure, host=host, step=sign.step, phase=sign.phase)
