"""Forks that compute with a model, and the pipe to each: of the calling process, or of one that left CUDA alone."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Protocol

from paceline.base.fork import die_with, prepare_to_fork
from paceline.keras.copies import packed, unpacked
from paceline.launch.process.subprocess_call import in_a_fresh_process

Life = Callable[[Connection], None]


class Fork(Protocol):
    """One fork. connection: this process's end of the pipe to it."""

    connection: Connection

    def exit_code(self, wait_s: float) -> int | None:
        """Of a fork that has ended or does so in this time, else None."""

    def kill(self) -> None:
        """End it, if it has not ended, and close the pipe to it."""


class Forks(Protocol):
    """Where forks are made. Each prints nothing, and ends with the calling process."""

    def fork(self, live: Life, device: str) -> Fork:
        """A fork that lives. device: on which it computes, where that is not as in the calling process."""

    def close(self) -> None:
        """Make no more."""


class OwnForks:
    """Forks of the calling process, which has left CUDA alone. They compute on the CPU."""

    def __init__(self) -> None:
        self._forks: list[_OwnFork] = []

    def fork(self, live: Life, device: str) -> Fork:
        prepare_to_fork()
        self._forks = [fork for fork in self._forks if not fork.connection.closed]
        process, parent_end = _forked(live, [fork.connection for fork in self._forks])
        self._forks.append(_OwnFork(process, parent_end))
        return self._forks[-1]

    def close(self) -> None:
        pass


class _OwnFork:
    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process, self.connection = process, connection

    def exit_code(self, wait_s: float) -> int | None:
        self.process.join(wait_s)
        return self.process.exitcode

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


class ForkServer:
    """Forks of a new interpreter. Each is sent the model as it is now, and has its tensors of a GPU on its own.

    The calling process has used CUDA, or will: its own forks could not.

    out_of_place: while what is sent must be as it is without this module's patches.
    """

    def __init__(self, out_of_place: Callable[[], AbstractContextManager[None]]) -> None:
        self._out_of_place = out_of_place
        self._control, child_end = multiprocessing.Pipe()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(child_end,), name="fork server", daemon=True
        )
        self._thread.start()

    def _run(self, child_end: Connection) -> None:
        try:
            in_a_fresh_process(_serve, [child_end])
        except BaseException as error:
            self._error = error
        finally:
            child_end.close()

    def fork(self, live: Life, device: str) -> Fork:
        parent_end, child_end = multiprocessing.Pipe()
        try:
            with self._out_of_place():
                data = packed(live)
            pid = self.ask("fork", device=device, data=data, handle=child_end.fileno())
        finally:
            child_end.close()
        return _ServedFork(self, pid, parent_end)

    def ask(
        self, verb: str, *, data: bytes | None = None, handle: int | None = None, **options: Any
    ) -> Any:
        """
        Raises:
            RuntimeError: the server has ended.
        """
        try:
            self._control.send_bytes(json.dumps({"do": verb, **options}).encode())
            if handle is not None and data is not None:
                send_handle(self._control, handle, None)
                self._control.send_bytes(data)
            return json.loads(self._control.recv_bytes())
        except (OSError, EOFError):
            self._thread.join()
            raise self._error or RuntimeError("the process that makes forks has ended") from None

    def close(self) -> None:
        self._control.close()
        self._thread.join()


class _ServedFork:
    def __init__(self, server: ForkServer, pid: int, connection: Connection) -> None:
        self.server, self.pid, self.connection = server, pid, connection

    def exit_code(self, wait_s: float) -> int | None:
        code: int | None = self.server.ask("wait", pid=self.pid, wait_s=wait_s)
        return code

    def kill(self) -> None:
        self.connection.close()
        self.server.ask("kill", pid=self.pid)


def _serve(connections: Sequence[Connection]) -> None:
    """The life of the server: it makes forks as it is told until nobody speaks to it."""
    (control,) = connections
    processes: dict[int, BaseProcess] = {}
    while True:
        try:
            order = json.loads(control.recv_bytes())
        except (EOFError, OSError):
            return
        answer = None
        if order["do"] == "fork":
            child_end = Connection(recv_handle(control))
            process = _process(
                _be_sent, control.recv_bytes(), order["device"], child_end, control, os.getpid()
            )
            processes[answer := process.pid or 0] = process
            child_end.close()
        else:
            process = processes[order["pid"]]
            if order["do"] == "kill":
                process.kill()
            process.join(order.get("wait_s"))
            answer = process.exitcode
        control.send_bytes(json.dumps(answer).encode())


def _be_sent(
    data: bytes, device: str, connection: Connection, control: Connection, parent_pid: int
) -> None:
    import keras
    import torch

    def live(connection: Connection) -> None:
        if device.startswith("cuda"):
            torch.cuda.set_device(torch.device(device))
        with keras.device(torch.device(device).type):
            unpacked(data)(connection)

    _be_fork(live, connection, [control], parent_pid)


def _forked(live: Life, not_its: Sequence[Connection]) -> tuple[BaseProcess, Connection]:
    """not_its: this process's ends of other pipes. The fork closes them, or others would not hear that this process
    has."""
    parent_end, child_end = multiprocessing.Pipe()
    process = _process(_be_fork, live, child_end, [parent_end, *not_its], os.getpid())
    child_end.close()
    return process, parent_end


def _process(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(
        target=target, args=arguments, daemon=True
    )
    process.start()
    return process


def _be_fork(
    live: Life, connection: Connection, not_ours: Sequence[Connection], parent_pid: int
) -> None:
    try:
        # What is garbage in the parent stays where it is: to destroy a process group is to wait for threads that a fork
        # does not have, for ever or until a segmentation fault.
        gc.freeze()
        die_with(parent_pid)
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # the calling process decides what an interrupt means
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # the calling process prints the same
        for other in not_ours:
            other.close()
        live(connection)
    finally:
        os._exit(0)
