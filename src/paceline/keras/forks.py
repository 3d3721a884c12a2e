"""Forks of the calling process that compute with its model, and the pipe to each."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from paceline.launch.fork import die_with, end_openmp_threads


def forked(live: Callable[[Connection], None], *, beside: Sequence[Connection] = ()) -> tuple[BaseProcess, Connection]:
    """A fork that lives, and this process's end of the pipe to it. It prints nothing, and ends with this process.

    beside: this process's ends of other pipes. The fork closes them, or others would not hear that this process has.
    """
    end_openmp_threads()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_be_fork, args=(live, theirs, [ours, *beside], os.getpid()), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _be_fork(live: Callable[[Connection], None], connection: Connection, not_ours: list[Connection],
             parent_pid: int) -> None:
    try:
        # What is garbage in the parent stays where it is: to destroy a process group is to wait for threads that a fork
        # does not have, for ever or until a segmentation fault.
        gc.freeze()
        die_with(parent_pid)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the calling process decides what an interrupt means
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # the calling process prints the same
        for other in not_ours:
            other.close()
        live(connection)
    finally:
        os._exit(0)
