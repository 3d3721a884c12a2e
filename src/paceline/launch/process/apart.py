"""Work with pipes to it: in forks of this process, or in a new one that has left CUDA alone."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from paceline.base.codec import receive
from paceline.launch.process.subprocess_call import in_a_fresh_process

_LOOK_S = 0.5


class Apart:
    """Work with pipes to it.

    connections: This end of each pipe.

    Args:
        begin: Given the other ends, begins the work, and returns the rest of it, which runs on a thread.
        is_sent: Whether both run in a new process, which ends with this one.
        finish: Called on the thread once the work has ended.
    """

    def __init__(
        self,
        begin: Callable[[Sequence[Connection]], Callable[[], Any]],
        num_pipes: int,
        *,
        is_sent: bool,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        pipes = [multiprocessing.Pipe() for _ in range(num_pipes)]
        self.connections, ends = [ours for ours, _ in pipes], [theirs for _, theirs in pipes]
        rest = (
            partial(in_a_fresh_process, lambda theirs: begin(theirs)(), ends)
            if is_sent
            else begin(ends)
        )
        self._answer: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._answer = rest()
            except BaseException as error:
                self._error = error
            finally:
                for end in ends:
                    end.close()
                finish()

        self._thread = threading.Thread(target=run, name="apart", daemon=True)
        self._thread.start()

    def receive(self, connection: Connection) -> Any:
        """Return what the work has sent.

        Raises:
            EOFError: the work has ended.
        """
        while self._thread.is_alive() and not connection.poll(_LOOK_S):
            pass
        if not connection.poll():  # other forks of this process may keep it open
            raise EOFError
        return receive(connection)

    def answer(self, wait_s: float | None = None) -> Any:
        """Return what the work returned, or None if it has not ended in time. What it raised is raised here."""
        self._thread.join(wait_s)
        if self._error is not None:
            raise self._error
        return self._answer

    def close(self, wait_s: float | None = None) -> None:
        """Close this end of the pipes, and wait for the end of the work, or so long."""
        for connection in self.connections:
            connection.close()
        self._thread.join(wait_s)
