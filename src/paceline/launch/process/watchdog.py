"""Ends a rank that can't go on, from a thread outside of what it waits for.

If another rank is known to have died, this one ends some seconds later even if its main thread doesn't notice: a
collective of NCCL never returns then. Where no process outside of the ranks looks for hangs, the threads take turns:
the last rank of a host whose thread runs looks at all of them, as the rank that hangs may hold the interpreter.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.base.errors import PacelineError, PeerLost
from paceline.launch.hosts.liveness import silence_s
from paceline.launch.process.context import RankContext
from paceline.launch.process.failure import Failure, failure_of
from paceline.launch.process.outside_watch import ANSWER_S, STORE_S, OutsideWatch, listed, within

_POLL_S = 0.02  # between looks for a word that a rank died, which makes what others say unnecessary
_AFTER_LOSS = "look at the last lines of its log; --resume goes on from the last checkpoint"


class Watchdog:
    """Ends this rank while the block runs, if another one is lost or hangs.

    `report` is given the failure, and the process leaves at once with its exit code: its main thread can't.
    """

    def __init__(self, context: RankContext, *, report: Callable[[Failure], None]) -> None:
        self.context, self.report, self.done = context, report, threading.Event()
        self.thread = threading.Thread(target=self._watch, name="paceline-watch", daemon=True)

    def __enter__(self) -> Watchdog:
        if not self.context.is_watched:
            self.thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.done.set()

    def _watch(self) -> None:
        while not self.done.wait(min(1.0, self.context.timeout_s / 4)):
            if self.context.unreachable:
                failure = self._silence(self.context.unreachable[0])
            elif self.context.lost:
                self.done.wait(ANSWER_S)  # the main thread may hear of it itself, and say more
                failure = self._loss()
            elif self.context.watch is not None and (hang := self._look(self.context.watch)):
                failure = hang
            else:
                continue
            if not self.done.is_set():
                self.report(failure)
                os._exit(failure.exit_code)

    def _look(self, watch: OutsideWatch) -> Failure | None:
        """Look at the ranks of this host, if none after this one can. Rank 0 keeps the store, in which the others look
        for the cause when one has left."""
        board, slot = self.context.board, self.context.slot
        board.note_look(slot)
        if any(board.can_look(other) for other in watch.ranks if other > slot):
            return None
        hang = watch.look({other: pid for other in watch.ranks if (pid := board.process(other))})
        return hang if hang is None or hang.host else _as_seen(hang, self.context)

    def _loss(self) -> Failure:
        """The report of a rank that can't go on without one that died."""
        gone = self.context.lost[:1]
        return _loss(self.context, gone, "its process or its host ended")

    def _silence(self, lost: int) -> Failure:
        """The report of a rank whose host gave no answer, which nobody else can give."""
        return replace(
            _loss(self.context, [lost], ""),
            message=f"it can't be reached: its host gave no answer for {silence_s(self.context.timeout_s):g} s",
            hint="is the host down, or its network? --resume goes on from the last checkpoint",
            heard=False,
        )


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
        until_s = time.monotonic() + ANSWER_S
        while not context.dead and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return context.dead[:1] or [
            r for r in range(context.world_size) if not store.check([f"here/{r}"])
        ]

    silent = within(ANSWER_S + STORE_S, ask)  # None: the store lived in the process that died
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
        f"rank {listed(gone)} is gone: {how} while rank {context.rank} was in {context.sign}",
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
