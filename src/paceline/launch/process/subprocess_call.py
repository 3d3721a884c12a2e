"""A new interpreter on this machine, for work that forks of this process can't do: those of one that has used CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from paceline.base.errors import UsageError
from paceline.base.fork import answer_of, ask_forks_about_cuda, die_with, value_of

Work = Callable[[Sequence[Connection]], Any]


def in_a_fresh_process(work: Work, connections: Sequence[Connection] = ()) -> Any:
    """What `work(connections)` returns, as JSON brings it: run in a new interpreter, which ends with this process.

    The work and all that it holds go there through a pipe, by cloudpickle: functions and classes of `__main__` by
    value, those of modules by name. The interpreter finds the modules that this one finds.

    Raises:
        UsageError: something of it can't be sent; PacelineError: the work raised it, or one of its kinds.
        RuntimeError: the work failed otherwise.
    """
    with ExitStack() as ends:
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        answer, request = (
            ends.enter_context(open(ours_in, "rb")),
            ends.enter_context(open(ours_out, "wb")),
        )
        passed = [theirs_in, theirs_out, *(connection.fileno() for connection in connections)]
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), *map(str, passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        ends.callback(process.wait)
        ends.callback(request.close)  # which ends a process that was not sent everything
        os.close(theirs_in)
        os.close(theirs_out)
        _send(work, request)
        document = answer.read()
    return value_of(document, process.returncode)


def _send(work: Work, request: Any) -> None:
    import cloudpickle

    try:
        cloudpickle.dump(work, request)
        request.flush()
    except BrokenPipeError:
        pass  # its answer, or its end, says why
    except Exception as error:
        raise UsageError(
            f"CUDA is in use in this process, so ranks are started from a new one, and something can't be sent "
            f"there: {type(error).__name__}: {error}",
            hint="make such objects where they are used, or leave CUDA alone before the training: ranks are then forks "
            "of this process",
        ) from error


def _main(parent_pid: int, request: int, answer: int, *descriptors: int) -> None:
    import signal

    die_with(parent_pid)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the process that waits for this one decides what it means
    ask_forks_about_cuda()
    with open(answer, "wb") as pipe:
        pipe.write(
            json.dumps(
                answer_of(lambda: _received(request)([*map(Connection, descriptors)]))
            ).encode()
        )


def _received(request: int) -> Work:
    """What the parent has sent, which is of its own memory: no file and no other host is read."""
    import cloudpickle

    with open(request, "rb") as pipe:
        work: Work = cloudpickle.load(pipe)
    return work


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
