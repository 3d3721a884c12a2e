"""Files of tests side by side, in forks of the process that has collected them.

An interpreter for each worker, which imports torch and collects all tests, takes 15 s of a core.
Forks take that once.
"""

from __future__ import annotations

import atexit
import json
import marshal
import os
import signal
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from paceline.base.fork import die_with

_SECONDS = Path(__file__).with_name("seconds.json")
_LONG_S = 2
_NUMBER = struct.Struct("I")
_LOOK_S = 1.0  # for a worker that was killed: its forks may keep its connection open


def add_workers(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, help="run files of tests side by side in so many forks"
    )
    parser.addoption(
        "--write-seconds", action="store_true", help=f"write to {_SECONDS.name} how long files took"
    )


def file_seconds() -> dict[str, int]:
    """How long each file of tests took when it was last written: that of those which took long.

    The longest begin first. One that began last would run alone at the end.
    """
    seconds: dict[str, int] = json.loads(_SECONDS.read_text())
    return seconds


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    # Unset where pytest loads this file after it has read the options.
    number = session.config.getoption("workers", 0)
    if not number or session.config.option.collectonly or session.testsfailed:
        return None  # to pytest's own
    with _Workers(session) as workers:
        for _ in range(number):
            workers.start([])
        workers.hear()
    if session.config.getoption("write_seconds"):
        workers.write_seconds()
    return True


def _files(items: Sequence[pytest.Item]) -> list[list[int]]:
    """The numbers of each file's tests. Files that use a workshop are as one: a worker starts one workshop."""
    shops = {item.path for item in items if "workshops" in getattr(item, "fixturenames", ())}
    files: dict[Path | None, list[int]] = {}
    for number, item in enumerate(items):
        files.setdefault(None if item.path in shops else item.path, []).append(number)
    return list(files.values())


@dataclass
class _Worker:
    """A fork that runs tests. running: the number of its test; None once it has run its last."""

    pid: int
    line: Connection
    running: int | None = None
    is_done: bool = False


class _Workers:
    """The workers of a session. A worker that is killed fails its test, and another one goes on with the file."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._files = _files(session.items)
        self._seconds: Counter[str] = Counter()
        self._queue, writing = os.pipe()  # numbers of files: each worker takes the next one
        os.write(writing, b"".join(map(_NUMBER.pack, range(len(self._files)))))
        os.close(writing)
        self._names = count()
        self._workers: list[_Worker] = []
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: Any) -> None:
        for worker in self._workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
        os.close(self._queue)

    def start(self, rest: Sequence[int]) -> None:
        """Start a worker. rest: tests that it runs before it takes a file."""
        name, parent_pid = f"worker-{next(self._names)}", os.getpid()
        hearing, telling = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with(parent_pid)
                hearing.close()
                self._work(name, rest, telling)
                atexit._run_exitfuncs()
                code = 0
            finally:
                os._exit(code)
        telling.close()
        self._workers.append(_Worker(pid, hearing))

    def hear(self) -> None:
        """Report what the workers say until all have ended."""
        while self._workers:
            ready = wait([worker.line for worker in self._workers], _LOOK_S)
            for worker in list(self._workers):
                if worker.line in ready and self._hear(worker):
                    continue
                pid, status = os.waitpid(worker.pid, 0 if worker.line in ready else os.WNOHANG)
                if pid and not (worker.line not in ready and worker.line.poll()):
                    self._workers.remove(worker)
                    self._end(worker, os.waitstatus_to_exitcode(status))

    def _hear(self, worker: _Worker) -> bool:
        """Hear a message. Returns whether there was one."""
        try:
            running, report = marshal.loads(worker.line.recv_bytes())
        except (EOFError, OSError):
            return False
        worker.running, worker.is_done = running, running is None
        if report is not None:
            hook = self._session.config.hook
            self._report(
                hook.pytest_report_from_serializable(config=self._session.config, data=report)
            )
        return True

    def write_seconds(self) -> None:
        seconds = {**file_seconds(), **self._seconds}
        long = {
            file: round(seconds)
            for file, seconds in seconds.items()
            if seconds >= _LONG_S and Path(file).exists()
        }
        _SECONDS.write_text(json.dumps(long, indent=1, sort_keys=True) + "\n")

    def _report(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration
        self._session.config.hook.pytest_runtest_logreport(report=report)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _end(self, worker: _Worker, code: int) -> None:
        worker.line.close()
        if worker.is_done:
            return
        if worker.running is None:
            raise RuntimeError(f"a worker ended with {code} before its first test")
        item = self._session.items[worker.running]
        (file,) = (file for file in self._files if worker.running in file)
        self._report(
            pytest.TestReport(
                item.nodeid,
                item.location,
                {},
                "failed",
                f"the process that ran this test ended with {code}",
                "call",
            )
        )
        self.start(file[file.index(worker.running) + 1 :])

    def _work(self, name: str, rest: Sequence[int], line: Connection) -> None:
        """Run tests, in the worker."""
        config, items = self._session.config, self._session.items
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # the files of the parent's are those of all forks
        capture.start_global_capturing()
        capture.suspend_global_capture()
        folder: Any = config._tmp_path_factory  # type: ignore[attr-defined]
        folder._basetemp = folder.getbasetemp() / name
        folder._basetemp.mkdir(mode=0o700)
        teller = _Teller(config, line)
        config.pluginmanager.register(teller)
        numbers = self._upcoming(rest)
        number = next(numbers, None)
        while number is not None:
            teller.tell(number)
            item, number = items[number], next(numbers, None)
            config.hook.pytest_runtest_protocol(
                item=item, nextitem=None if number is None else items[number]
            )
        teller.tell(None)

    def _upcoming(self, rest: Sequence[int]) -> Iterator[int]:
        yield from rest
        while taken := os.read(self._queue, _NUMBER.size):
            yield from self._files[_NUMBER.unpack(taken)[0]]


class _Teller:
    """Sends what a worker does to the parent, which shows it."""

    def __init__(self, config: pytest.Config, line: Connection) -> None:
        self._config, self._line = config, line
        self._running: int | None = None

    def tell(self, running: int | None, report: Any = None) -> None:
        self._running = running
        self._line.send_bytes(marshal.dumps((running, report)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            self.tell(
                self._running,
                self._config.hook.pytest_report_to_serializable(config=self._config, report=report),
            )
        return True
