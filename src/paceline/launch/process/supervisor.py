"""The processes that work for this one on its machine, one in a slot: started, told, heard and ended here alone.

They are forks of a process that forks when asked, as this one was when the supervisor was made: one thread, all imports
done. Whoever searches comes to have threads and open connections (databases, samplers with linear algebra), and a fork
of that process could wait for ever for a lock that nobody opens. The fork server never does anything but fork.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from paceline.base import signals
from paceline.base.errors import PeerLost
from paceline.base.fork import die_with, prepare_to_fork
from paceline.launch.process.messages import Line, Message

_LINE_BYTES = 4096
_LOOK_S, _HEAR_S = 0.05, 0.5
_REAP_S = 5.0  # for a process that was killed, or whose connection is closed, to be gone

Main = Callable[[int, Line], None]


@dataclass
class _Process:
    """exit_code: once it is known; the number may be another process's then."""

    pid: int
    connection: Connection
    exit_code: int | None = None


class Supervisor:
    """Runs `main(slot, line)` in processes. They end with this one, however that happens.

    Not for use by several threads at once. is_server_lost: the fork server was found killed, and its forks with it.
    """

    def __init__(self, main: Main) -> None:
        prepare_to_fork()
        self._processes: dict[int, _Process] = {}
        self.is_server_lost = False
        self._socket, server_end = socket.socketpair()
        self._server: Any = multiprocessing.get_context("fork").Process(
            target=_serve, args=(main, server_end, self._socket, os.getpid())
        )
        with (
            signals.blocked()
        ):  # the server keeps them blocked: this process decides what they mean
            self._server.start()
        server_end.close()

    def close(self) -> None:
        """End all processes."""
        self._socket.close()
        self._server.kill()
        self._server.join()
        for process in self._processes.values():
            process.connection.close()
        if os.isatty(2):
            os.write(
                2, b"\x1b[?25h"
            )  # the cursor, which a rank hides while it draws, and may be killed

    def start(self, slot: int) -> None:
        """Start a process in a slot, after the one that is there is ended.

        Raises:
            OSError: no process can be forked. PeerLost: the fork server was killed.
        """
        self.end(slot)
        answer, descriptors = self._ask({"fork": slot})
        if not descriptors:  # the system drops one that finds no place here
            raise OSError(answer.get("error", "too many files are open in this process"))
        self._processes[slot] = _Process(answer["pid"], Connection(descriptors[0]))

    def is_idle(self, slot: int) -> bool:
        """Whether a process is there, if it owes no word: all that it could have said is that it has ended."""
        process = self._processes.get(slot)
        return process is not None and not process.connection.poll()

    def pids(self, slots: Iterable[int]) -> dict[int, int]:
        """Of the processes in these slots that are not known to have ended."""
        return {
            slot: process.pid
            for slot in slots
            if (process := self._processes.get(slot)) and process.exit_code is None
        }

    def tell(self, slot: int, message: Message) -> None:
        """A process that has ended hears nothing."""
        if slot in self._processes:
            with suppress(OSError):
                self._processes[slot].connection.send_bytes(message.encode().encode())

    def signal(self, number: int, slots: Sequence[int] | None = None) -> None:
        """Signal the processes in these slots, or all."""
        for pid in self.pids(list(self._processes) if slots is None else slots).values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(
        self, slots: Sequence[int], timeout_s: float, *, also: Sequence[int] = ()
    ) -> list[tuple[int, Message]]:
        """What is heard of these slots, at once if anything is, else within the timeout.

        also: descriptors; nothing is heard, at once, when one of them can be read.
        """
        connections = {self._processes[slot].connection: slot for slot in slots}
        ready = wait([*connections, *also], timeout_s)
        if ready:
            return [
                (slot, self._read(slot))
                for connection, slot in connections.items()
                if connection in ready
            ]
        return [
            (slot, Message(0, "ended", 0, code))
            for slot in slots  # its own forks keep its connection open
            if (code := self._exit_code(slot, patience_s=0.0)) is not None and self.is_idle(slot)
        ]

    def hear_out(
        self, slots: Sequence[int], timeout_s: float = math.inf
    ) -> dict[int, tuple[int | None, Any]]:
        """Wait until these processes have ended. Returns the exit code and the last word of each that does in time."""
        words, codes = dict[int, Any](), dict[int, int | None]()
        until_s = time.monotonic() + timeout_s
        while len(codes) < len(slots) and (left_s := until_s - time.monotonic()) > 0:
            running = [slot for slot in slots if slot not in codes]
            for slot, message in self.wait(running, min(left_s, _HEAR_S)):
                (codes if message.kind == "ended" else words)[slot] = message.value
        return {slot: (code, words.get(slot)) for slot, code in codes.items()}

    def _read(self, slot: int) -> Message:
        try:
            return Message.decode(self._processes[slot].connection.recv_bytes())
        except (EOFError, OSError):
            return Message(0, "ended", 0, self._exit_code(slot, patience_s=_REAP_S))

    def end(self, slot: int, *, patience_s: float = 0.0) -> None:
        """End the slot's process, if there is one that doesn't end by itself in time."""
        if slot in self._processes:
            if self._exit_code(slot, patience_s=patience_s) is None:
                self.signal(signal.SIGKILL, [slot])
                self._exit_code(slot, patience_s=_REAP_S)
            self._processes.pop(slot).connection.close()

    def _exit_code(self, slot: int, *, patience_s: float) -> int | None:
        """Of a process that has ended or does so in time; negative for a signal, None if it is still there."""
        process = self._processes[slot]
        if process.exit_code is None:
            try:
                process.exit_code = self._ask({"reap": process.pid, "patience_s": patience_s})[0][
                    "code"
                ]
            except PeerLost:
                process.exit_code = -signal.SIGKILL
        return process.exit_code

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """
        Raises:
            PeerLost: the fork server was killed, and its forks with it.
        """
        with suppress(OSError):
            self._socket.sendall(_line(request))
            line, descriptors, _, _ = socket.recv_fds(self._socket, _LINE_BYTES, 1)
            if line:
                return json.loads(line), descriptors
        self.is_server_lost = True
        raise PeerLost(
            "the process that forks ranks was killed", hint="see dmesg: memory may have run out"
        )


# --- In the fork server and the processes -----------------------------------------------------------------------


def _line(document: Any) -> bytes:
    return json.dumps(document).encode() + b"\n"


def _serve(main: Main, requests: socket.socket, parents: socket.socket, parent_pid: int) -> None:
    parents.close()
    die_with(parent_pid)
    gc.freeze()  # collectors of forks need not look at what there is: it would take time, and copy each page looked at
    children: dict[int, Any] = {}
    with requests.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            if "fork" in request:
                _fork(main, request["fork"], requests, children)
            else:
                code = _reap(children[request["reap"]], request["patience_s"])
                requests.sendall(_line({"code": code}))
                if code is not None:
                    del children[request["reap"]]
    for child in children.values():
        child.kill()


def _reap(child: Any, patience_s: float) -> int | None:
    """The exit code of a process that ends in time. Its own forks may outlive it and keep what `join` waits for."""
    until_s = time.monotonic() + patience_s
    while child.exitcode is None and time.monotonic() < until_s:
        wait([child.sentinel], _LOOK_S)
    code: int | None = child.exitcode
    return code


def _fork(main: Main, slot: int, requests: socket.socket, children: dict[int, Any]) -> None:
    try:
        parent_end, child_end = multiprocessing.Pipe()
        with parent_end, child_end:
            child = multiprocessing.get_context("fork").Process(
                target=_be_process,
                args=(main, slot, child_end, [requests, parent_end], os.getpid()),
            )
            child.start()
            assert child.pid is not None
            children[child.pid] = child
            socket.send_fds(requests, [_line({"pid": child.pid})], [parent_end.fileno()])
    except OSError as error:
        requests.sendall(_line({"error": str(error)}))


def _be_process(
    main: Main, slot: int, connection: Connection, others: list[Any], parent_pid: int
) -> None:
    for each in others:
        each.close()
    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPPING)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    main(slot, Line(connection))
