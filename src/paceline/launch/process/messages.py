"""What a process and whoever supervises it tell each other, here and on other nodes: one kind of message, as JSON."""

from __future__ import annotations

import json
import select
import threading
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.launch.process.failure import Failure

Kind = Literal["start", "answer", "order", "stop", "report", "question", "end", "ended", "lost"]


class RanksGone(Exception):
    """Ranks ended while whoever supervises them waited for a word; what they left says why."""


@dataclass(frozen=True, slots=True)
class Message:
    """Of a task, by one of its ranks or to it.

    kind: an "answer" is to a question, an "order" comes unasked; "end" is a rank's or a task's last word; "ended" is
        said of a process, with its exit code, by whoever started it; "lost" of a task by whoever lost its node.
    value: what JSON can hold. Of a task's end: rank 0's result or None.
    failure: why it ended, if it failed. log: the rank's.
    """

    task: int
    kind: Kind
    rank: int
    value: Any = None
    failure: Failure | None = None
    log: str | None = None

    def encode(self) -> str:
        """A line of JSON, in which numbers that are none stay so."""
        return json.dumps(
            self, default=lambda value: {f.name: getattr(value, f.name) for f in fields(value)}
        )

    @classmethod
    def decode(cls, text: str | bytes) -> Message:
        return msgspec.convert(json.loads(text), cls)


class Line:
    """A process's end of the connection to whoever supervises it; what it says is of the task that it began last."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._task = self._rank = 0

    def start(self) -> Message:
        """Wait for a task.

        Raises:
            EOFError, OSError: whoever supervises is gone.
        """
        message = Message.decode(self._connection.recv_bytes())
        self._task, self._rank = message.task, message.rank
        return message

    def report(self, value: Any) -> None:
        """Tell whoever started the task."""
        self._send("report", value)

    def ask(self, question: Any) -> Any:
        """Ask whoever started the task, and wait for the answer."""
        self._send("question", question)
        return Message.decode(self._connection.recv_bytes()).value

    @property
    def is_writable(self) -> bool:
        """Whether a short report would be sent at once."""
        poller = select.poll()
        poller.register(self._connection, select.POLLOUT)
        return bool(poller.poll(0))

    def hear(self, timeout_s: float | None) -> Message | None:
        """What whoever supervises says within the timeout; None is without an end.

        Raises:
            EOFError, OSError: it is gone.
        """
        return (
            Message.decode(self._connection.recv_bytes())
            if self._connection.poll(timeout_s)
            else None
        )

    def question(self, value: Any) -> None:
        """Ask without waiting for the answer."""
        self._send("question", value)

    def end(self, value: Any, failure: Failure | None, log: Path | None = None) -> None:
        """A process that goes on after it may say it again, with what it knows then."""
        self._send("end", value, failure, None if log is None else str(log))

    def _send(
        self, kind: Kind, value: Any, failure: Failure | None = None, log: str | None = None
    ) -> None:
        data = Message(self._task, kind, self._rank, value, failure, log).encode().encode()
        with (
            self._lock,
            suppress(OSError),
        ):  # whoever supervises is gone, and this process ends with it
            self._connection.send_bytes(data)
