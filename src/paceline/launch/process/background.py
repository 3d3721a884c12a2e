"""Work in a fork of this process, beside what goes on here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

from paceline.base import signals
from paceline.base.fork import die_with, prepare_to_fork, refuse_used_cuda
from paceline.base.inherited import close_connections
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.launch.process.malloc import set_up_heap
from paceline.launch.process.rank_process import use_threads

_BESIDE_NICE = (
    10  # a tenth of a rank's share: at 19 a second of work lasted for 17 steps of the byte GPT
)
_END_S, _POLL_S = 30.0, 0.002


@contextmanager
def aside(work: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Run `work()` in a fork while the block runs; the fork is ended with the block, if it isn't done by then.

    It begins with one thread; `take_cores` gives it more.

    An error of the work is printed and ends the fork.

    Yields:
        Whether the fork has ended; may be asked in other forks of this process, too.

    Raises:
        PacelineError: CUDA is already in use in this process, which forks can't share.
    """
    refuse_used_cuda()
    prepare_to_fork()
    sys.stdout.flush()
    sys.stderr.flush()
    parent_pid, pid = os.getpid(), os.fork()
    if pid == 0:
        _be_fork(work, parent_pid)
    try:
        yield lambda: _has_ended(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def run_beside(
    work: Callable[[HeartbeatTable], None] | None, board: HeartbeatTable
) -> Iterator[None]:
    """Run `work(board)` in a fork of low priority while the block runs; it looks for `board.over`, and is given time to
    end then, but after an error.

    A thread would not do. What it locks, in a library of matrix products say, stays locked for ever in ranks that are
    forked meanwhile.
    """
    if work is None:
        yield
        return

    def at_low_priority() -> None:
        os.nice(_BESIDE_NICE)
        work(board)

    with aside(at_low_priority) as has_ended:
        try:
            yield
        finally:
            board.over = True
        until_s = time.monotonic() + _END_S
        while not has_ended() and time.monotonic() < until_s:
            time.sleep(_POLL_S)


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def take_cores() -> None:
    """Use all cores from now on, as a run's only rank does."""
    if (
        multiprocessing.parent_process() is None
    ):  # else OpenMP may list threads that are not here, see above
        use_threads(1)


def _be_fork(work: Callable[[], None], parent_pid: int) -> None:
    code = 1
    try:
        die_with(parent_pid)
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
