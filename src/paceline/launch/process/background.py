"""Work in a fork of this process, beside what goes on here."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import psutil
import torch

from paceline.base import signals
from paceline.base.fork import die_with, prepare_to_fork, refuse_used_cuda
from paceline.base.inherited import close_connections
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.launch.process.malloc import set_up_heap

_BESIDE_NICE = (
    10  # a tenth of a rank's share: at 19 a second of work lasted for 17 steps of the byte GPT
)
_END_S, _POLL_S = 30.0, 0.002


@contextmanager
def run_beside(
    work: Callable[[HeartbeatTable], None] | None, board: HeartbeatTable
) -> Iterator[None]:
    """Run `work(board)` in a fork of low priority while the block runs; it looks for `board.over`, and is given time to
    end then, but after an error.

    An error of the work is printed and ends the fork. A thread would not do. What it locks, in a library of matrix
    products say, stays locked for ever in ranks that are forked meanwhile.

    Raises:
        PacelineError: CUDA is already in use in this process, which forks can't share.
    """
    if work is None:
        yield
        return
    refuse_used_cuda()
    prepare_to_fork()
    sys.stdout.flush()
    sys.stderr.flush()
    parent_pid, pid = os.getpid(), os.fork()
    if pid == 0:
        _be_fork(partial(work, board), parent_pid)
    try:
        try:
            yield
        finally:
            board.over = True
        until_s = time.monotonic() + _END_S
        while not _has_ended(pid) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _be_fork(work: Callable[[], None], parent_pid: int) -> None:
    code = 1
    try:
        die_with(parent_pid)
        os.nice(_BESIDE_NICE)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPPING)
        close_connections()
        torch.set_num_threads(1)
        set_up_heap(keep=True)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
