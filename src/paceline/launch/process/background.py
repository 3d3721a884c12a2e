"""Work in a process of its own, beside the ranks of a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from paceline.base.inherited import close_connections
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.launch.process.malloc import set_up_heap
from paceline.launch.process.supervisor import Supervisor

Work = Callable[[HeartbeatTable], None]

_BESIDE_NICE = (
    10  # a tenth of a rank's share: at 19 a second of work lasted for 17 steps of the byte GPT
)
_END_S = 30.0


@contextmanager
def run_beside(work: Work | None, board: HeartbeatTable, processes: Supervisor) -> Iterator[None]:
    """Have `be_beside` run in the slot after the ranks' while the block runs; it is given time to end then, but after
    an error.

    A thread would not do. What it locks, in a library of matrix products say, stays locked for ever in ranks that are
    forked meanwhile.
    """
    if work is not None:
        processes.start(board.num_ranks)
    try:
        yield
    finally:
        board.over = True
    processes.end(board.num_ranks, patience_s=_END_S)


def be_beside(work: Work, board: HeartbeatTable) -> None:
    """Run `work(board)` at a low priority, in its process. It looks for `board.over`, so no other word ends it."""
    os.nice(_BESIDE_NICE)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which all processes of a run are sent
    close_connections()
    torch.set_num_threads(1)
    set_up_heap(keep=True)
    work(board)
