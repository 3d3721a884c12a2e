"""Ends a run whose ranks wait for each other, and names the one they wait for.

Each rank watches itself from a thread outside the collectives. When its main thread has shown no sign of life for
the timeout, it tells the others where it is: waiting in a collective, or stuck in code of its own. The rank that
is stuck in its own code, or that says nothing at all, is the culprit.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

from paceline.errors import PeerLost
from paceline.launch.context import RankContext
from paceline.launch.failure import Failure, failure_of, is_users

_ANSWER_S = 3.0  # how long to wait for what the other ranks say
# Frames that mean: this rank waits for others.
_WAITING = ("torch/distributed/", "paceline/strategies/data/run.py", "paceline/strategies/server/",
            "paceline/runtime/servers/")


class Watch:
    """Watches this rank's main thread while the block runs.

    On a hang `report` is given the failure, and the process leaves at once with its exit code: its main thread
    can't.
    """

    def __init__(self, context: RankContext, *, timeout_s: float, report: Callable[[Failure], None]) -> None:
        self.context, self.timeout_s, self.report = context, timeout_s, report
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="paceline-watch", daemon=True)

    def __enter__(self) -> Watch:
        if self.context.world_size > 1:
            self.thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.done.set()

    def _watch(self) -> None:
        while not self.done.wait(min(1.0, self.timeout_s / 4)):
            if time.monotonic() - self.context.sign.time_s > self.timeout_s:
                failure = self._ask_around()
                if not self.done.is_set():
                    self.report(failure)
                    os._exit(failure.exit_code)

    def _ask_around(self) -> Failure:
        """Say where this rank is, hear where the others are, and name the culprit."""
        store, rank = self.context.store, self.context.rank
        assert store is not None
        store.set(f"stuck/{rank}", json.dumps(self._position()))
        time.sleep(_ANSWER_S)
        heard = {r: json.loads(store.get(f"stuck/{r}")) for r in range(self.context.world_size)
                 if store.check([f"stuck/{r}"])}
        return hang_failure(heard, world_size=self.context.world_size, rank=rank, timeout_s=self.timeout_s)

    def _position(self) -> dict[str, Any]:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        sign = self.context.sign
        stack = traceback.format_stack(frame) if frame else []
        # On a GPU a collective returns at once, and the rank waits where it reads the result: in the reduce phase.
        return {"step": sign.step, "phase": sign.phase, "waits": sign.phase == "reduce" or is_waiting(frame),
                "where": _user_place(frame), "host": os.uname().nodename, "stack": "".join(stack[-6:])}


def is_waiting(frame: FrameType | None) -> bool:
    """Whether the innermost frames of a stack wait in a collective."""
    depth = 0
    while frame is not None and depth < 6:
        if any(part in frame.f_code.co_filename.replace(os.sep, "/") for part in _WAITING):
            return True
        frame, depth = frame.f_back, depth + 1
    return False


def _user_place(frame: FrameType | None) -> str:
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def hang_failure(heard: dict[int, dict[str, Any]], *, world_size: int, rank: int, timeout_s: float) -> Failure:
    """The report of a hang, in the culprit's name, from what each rank said of itself; `rank` writes it."""
    silent = [r for r in range(world_size) if r not in heard]
    stuck = [r for r, at in heard.items() if not at["waits"]]
    waiting = [r for r, at in heard.items() if at["waits"]]
    culprit, trace = rank, ""
    if silent:
        culprit = silent[0]
        message = f"rank {_listed(silent)} gave no sign of life for {timeout_s:g} s"
    elif stuck:
        culprit = stuck[0]
        message = f"rank {_listed(stuck)} did not reach the collective that the others wait for in {timeout_s:g} s"
        trace = f"Stack of rank {culprit}:\n{heard[culprit]['stack'].rstrip()}"
    else:
        steps = ", ".join(f"rank {r}: step {at['step']} ({at['phase']})" for r, at in sorted(heard.items()))
        message = f"all ranks wait in collectives that don't match for {timeout_s:g} s: {steps}"
    if waiting and (silent or stuck):
        message += f"; rank {_listed(waiting)} waited for it"
    at = heard.get(culprit, {"step": 0, "phase": "start", "where": "", "host": ""})
    return Failure(culprit, at["host"], PeerLost.__name__, f"{message}\n\nhint: --timeout SECONDS allows longer pauses",
                   PeerLost.exit_code, heard=False, step=at["step"], phase=at["phase"], where=at["where"], trace=trace,
                   time_s=time.time())


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def peer_loss(context: RankContext, error: BaseException) -> Failure:
    """The report of a rank whose collective broke: names the ranks that no longer answer.

    Every rank that is still there says so in the store; who stays silent is gone.
    """
    own = failure_of(error, rank=context.rank, sign=context.sign)
    store = context.store
    if store is None or not own.heard:
        return own
    try:
        store.set(f"here/{context.rank}", "1")
        time.sleep(_ANSWER_S)
        gone = [r for r in range(context.world_size) if not store.check([f"here/{r}"])]
    except RuntimeError:  # the store lived in the process that died
        return own
    if not gone:
        return own
    message = (f"rank {_listed(gone)} is gone: it closed its connections while this rank was in {context.sign}\n\n"
               "hint: look at the last lines of its log; --resume goes on from the last checkpoint")
    return replace(own, kind=PeerLost.__name__, message=message, where="", trace="")
