"""Forks that compute with a model as it is now, and the pipe to each.

They are forks of the calling process, or of a new interpreter if the calling process has used CUDA, or will.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import keras
import torch

from paceline.base.codec import send
from paceline.keras import group
from paceline.keras.copies import packed, unpacked
from paceline.launch.process.apart import Apart
from paceline.launch.process.failure import Failure, cause_of, ended_alone
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.launch.process.messages import Line
from paceline.launch.process.outside_watch import OutsideWatch, be_watched
from paceline.launch.process.supervisor import Supervisor

_REPORT_S = 5.0  # for a rank that noticed the end of another one to hear why, and for a cause
_LOOK_S = 0.5

# It obeys or tells the other end of a pipe, and returns its failure, or None if it has no more to do. It may say in
# which step it is, and of which kind, which is a sign of life.
Life = Callable[[Connection, Callable[[int, str], None]], Failure | None]


class Forks:
    """A fork for each rank. They print nothing, wait once they have no more to do, and end with this process.

    Args:
        lives, devices: By rank. What a life holds is copied now.
        while_sent: While what is sent to a new interpreter must be packed; None for forks of this process.
        finish: Called on a thread once they have ended.
    """

    def __init__(
        self,
        lives: Mapping[int, Life],
        devices: Sequence[str],
        while_sent: Callable[[], AbstractContextManager[None]] | None,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        copies: Callable[[], Any] = lambda: lives  # noqa: E731
        if while_sent is not None:
            with while_sent():
                copies = partial(unpacked, packed(lives))
        begin = partial(_begin, copies, {rank: devices[rank] for rank in lives})
        self._apart = Apart(begin, len(lives) + 1, is_sent=while_sent is not None, finish=finish)
        self._control, *connections = self._apart.connections
        self._connections = dict(zip(lives, connections, strict=True))

    def send(self, rank: int, value: Any) -> None:
        """Tell a rank. Raises OSError if it has ended."""
        send(self._connections[rank], value)

    def receive(self, rank: int) -> Any:
        """Return what a rank tells. Raises EOFError if it has ended."""
        return self._apart.receive(self._connections[rank])

    def failure(self) -> Failure | None:
        """Return why they have ended, if they have or do so in time."""
        failures = self._apart.answer(_REPORT_S)
        return cause_of([*map(Failure.from_json, failures)]) if failures else None

    def close(self) -> None:
        """End them."""
        with suppress(OSError):  # they have ended
            send(self._control, "end")
        self._apart.close()


def _begin(
    copies: Callable[[], Mapping[int, Life]],
    devices: Mapping[int, str],
    connections: Sequence[Connection],
) -> Callable[[], list[str]]:
    control, *ends = connections
    pipes = dict(zip(devices, ends, strict=True))

    def live(rank: int, line: Line) -> None:
        be_watched(board, rank)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # the first rank prints the same
        if devices[rank].startswith("cuda"):
            torch.cuda.set_device(torch.device(devices[rank]))
        with keras.device(torch.device(devices[rank]).type):
            failure = copies()[rank](pipes[rank], partial(board.write, rank))
        if failure is None:
            signal.pause()
        line.end(None, failure)
        os._exit(0)  # the end of a process group would wait for its peers

    board = HeartbeatTable(max(devices) + 1)
    watch = OutsideWatch(
        board, {rank: rank for rank in devices}, patience_s=group.PATIENCE_S, sees_all=False
    )
    processes = Supervisor(live)  # not on the other thread, as Keras keeps its settings by thread
    for end in ends:
        end.close()
    return partial(_watch, processes, watch, set(devices), control)


def _watch(
    processes: Supervisor, watch: OutsideWatch, ranks: set[int], control: Connection
) -> list[str]:
    """Return the failures that ended the forks, as JSON; none if they were told to end."""
    failures: list[Failure] = []
    silent = set(ranks)
    with closing(processes):
        for rank in ranks:
            processes.start(rank)
        while not control.poll() and all(failure.heard for failure in failures):
            wait_s = _REPORT_S if failures else _LOOK_S
            news = processes.wait([*silent], wait_s, also=[control.fileno()])
            if failures and not news:
                break
            pids = {
                rank: pid
                for rank, pid in processes.pids(silent).items()
                if watch.board.read(rank).step and not watch.board.waits(rank)
            }
            if (hang := watch.look(pids)) is not None:
                failures.append(replace(hang, hint=None))  # there is no other patience
            for rank, message in news:
                silent.remove(rank)
                sign = watch.board.read(rank)
                failures.append(message.failure or ended_alone(rank, message.value, sign))
        for rank in ranks:
            processes.end(rank)
    return [failure.to_json() for failure in failures]
