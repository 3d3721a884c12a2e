"""A process that forks others on request: it has one thread, and all imports done, as this process had at its start.

The controller of a search gets threads and open connections (databases, samplers with linear algebra). A fork of the
controller could wait for ever for a lock that no thread releases. The fork server only forks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from paceline.launch.fork import die_with, end_openmp_threads

_LINE_BYTES = 4096
_REAP_S = 5.0

Main = Callable[[int, Connection], None]


@dataclass(frozen=True)
class ForkedProcess:
    """A process that the nursery forked, and the connection to it; it reads as ended when the process has."""

    pid: int
    connection: Connection


class ForkServer:
    """Forks processes that run `main(number, connection)`. They end with it, and it ends with the process that made it.

    Raises:
        OSError: no process can be forked.
    """

    def __init__(self, main: Main) -> None:
        end_openmp_threads()
        self._socket, theirs = socket.socketpair()
        self._process: Any = multiprocessing.get_context("fork").Process(
            target=_serve, args=(main, theirs, self._socket, os.getpid()))
        self._process.start()
        theirs.close()

    def fork(self, number: int) -> ForkedProcess:
        """Start another process."""
        self._socket.sendall(_line({"fork": number}))
        said, descriptors, _, _ = socket.recv_fds(self._socket, _LINE_BYTES, 1)
        if not said:
            raise OSError("the process that starts ranks has ended")
        answer = json.loads(said)
        if "error" in answer:
            raise OSError(answer["error"])
        return ForkedProcess(answer["pid"], Connection(descriptors[0]))

    def exit_code(self, pid: int) -> int | None:
        """Of a process that has ended or is about to; negative for a signal, None if it is still there."""
        self._socket.sendall(_line({"reap": pid}))
        return json.loads(self._socket.recv(_LINE_BYTES))["code"]

    def close(self) -> None:
        """End the nursery, and with it all that it forked."""
        self._socket.close()
        self._process.kill()
        self._process.join()


def _line(document: Any) -> bytes:
    return json.dumps(document).encode() + b"\n"


def _serve(main: Main, requests: socket.socket, parents: socket.socket, parent_pid: int) -> None:
    parents.close()
    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever made the nursery decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    children: dict[int, Any] = {}
    with requests.makefile("rb") as lines:
        for line in lines:
            asked = json.loads(line)
            if "fork" in asked:
                _fork(main, asked["fork"], requests, children)
            else:
                requests.sendall(_line({"code": _reap(children, asked["reap"])}))
    for child in children.values():
        child.kill()


def _fork(main: Main, number: int, requests: socket.socket, children: dict[int, Any]) -> None:
    ours, theirs = multiprocessing.Pipe()
    try:
        child = multiprocessing.get_context("fork").Process(
            target=_be_child, args=(main, number, theirs, [requests, ours], os.getpid()))
        child.start()
        assert child.pid is not None
        children[child.pid] = child
        socket.send_fds(requests, [_line({"pid": child.pid})], [ours.fileno()])
    except OSError as error:
        requests.sendall(_line({"error": str(error)}))
    finally:
        ours.close()
        theirs.close()


def _be_child(main: Main, number: int, connection: Connection, others: list[Any], parent_pid: int) -> None:
    for each in others:
        each.close()
    die_with(parent_pid)
    main(number, connection)


def _reap(children: dict[int, Any], pid: int) -> int | None:
    child = children.get(pid)
    if child is None:
        return None
    child.join(_REAP_S)
    code = child.exitcode
    if code is not None:
        with suppress(ValueError):
            child.close()
        del children[pid]
    return code
