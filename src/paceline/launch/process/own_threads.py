"""Ends a rank when a thread of its own ends by an exception: what waits for that thread would wait for ever."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.launch.process.context import RankContext
from paceline.launch.process.failure import Failure, failure_of

PREFIX = "paceline-"  # of the names of all threads that Paceline starts in a rank


@contextmanager
def own_threads_watched(context: RankContext, report: Callable[[Failure], None]) -> Iterator[None]:
    """While the block runs, an exception that leaves a thread of Paceline's is this rank's failure.

    `report` is given it, and the process leaves at once with its exit code: its main thread may wait for that thread.
    What threads of the user's do with exceptions is left to them.
    """
    before = threading.excepthook

    def end(hook_args: threading.ExceptHookArgs) -> None:
        if (
            hook_args.thread is None
            or not hook_args.thread.name.startswith(PREFIX)
            or hook_args.exc_value is None
        ):
            before(hook_args)
            return
        traceback.print_exception(hook_args.exc_value)
        sys.stderr.flush()
        failure = failure_of(hook_args.exc_value, rank=context.rank, sign=context.sign)
        report(failure)
        os._exit(failure.exit_code)

    threading.excepthook = end
    try:
        yield
    finally:
        threading.excepthook = before
