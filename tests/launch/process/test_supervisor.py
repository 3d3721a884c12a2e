"""A process that can't be forked, or not reached, is told of, and others are started as before."""

from __future__ import annotations

import multiprocessing
import os
import resource
from contextlib import ExitStack, closing
from typing import Any

import pytest

from paceline.launch.process.messages import Line
from paceline.launch.process.supervisor import Supervisor


def _say_one(slot: int, line: Line) -> None:
    line.end(slot + 1, None)


def test_the_fork_server_has_no_more_files(monkeypatch: pytest.MonkeyPatch):
    made = multiprocessing.Pipe
    calls = iter([True])

    def pipe() -> Any:
        if next(calls, False):
            raise OSError("too many open files")
        return made()

    monkeypatch.setattr(multiprocessing, "Pipe", pipe)
    with closing(Supervisor(_say_one)) as processes:
        with pytest.raises(OSError, match="too many open files"):
            processes.start(0)
        processes.start(1)
        assert processes.hear_out([1], 60.0) == {1: (0, 2)}


def test_this_process_has_no_more_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(Supervisor(_say_one)) as processes, ExitStack() as files:
        last = files.enter_context(open(os.devnull)).fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
        try:
            with pytest.raises(OSError, match="too many files are open"):
                processes.start(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        processes.start(1)
        assert processes.hear_out([1], 60.0) == {1: (0, 2)}
