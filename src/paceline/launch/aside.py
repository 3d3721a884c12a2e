"""Work in a fork of this process, beside what goes on here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

from paceline.launch import signals
from paceline.launch.local import die_with, end_openmp_threads, refuse_used_cuda
from paceline.launch.process import set_up_heap, use_threads


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
    end_openmp_threads()
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


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def take_cores() -> None:
    """Use all cores from now on, as a run's only rank does."""
    if multiprocessing.parent_process() is None:  # else OpenMP may list threads that are not here, see above
        use_threads(1)


def _be_fork(work: Callable[[], None], parent_pid: int) -> None:
    code = 1
    try:
        die_with(parent_pid)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPPING)
        torch.set_num_threads(1)
        set_up_heap(keep=True)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
