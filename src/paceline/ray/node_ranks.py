"""The ranks of a training on one node: processes that lines of JSON on stdin start and signal.

    python -m paceline.ray.node_ranks

The first line is a `TrainingGreeting`, the others are `Message`s; the end of stdin kills the ranks.
Lines that ranks print on stderr are sent back one by one ("report"), and lines that they print on
stdout, which are `Message`s, as they are. The end of each rank is sent with its exit code
("ended"). The program that starts this process carries the lines (`ray/nodes.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.base.errors import PacelineError, UsageError
from paceline.launch.hosts.nodes import STARTED, write_line
from paceline.launch.hosts.shared_files import SharedFiles
from paceline.launch.process.messages import Message

_LINE_BYTES = 2**26  # length of the longest line
# seconds to wait for a rank's output after its end, because its forks may keep the pipe open
_PRINTED_S = 2.0
_PORTS = range(20000, 32768)  # below the ports that Linux uses for outgoing connections


@dataclass(frozen=True)
class TrainingGreeting:
    """The first message to a node; the node answers with a free port."""

    shared: SharedFiles
    folder: str  # where the ranks work

    @classmethod
    def decode(cls, line: bytes) -> TrainingGreeting:
        document = json.loads(line)
        return cls(SharedFiles(**document["shared"]), document["folder"])

    def check(self) -> None:
        """Check that this node can run ranks of the training.

        Raises:
            UsageError: this node does not see the files or the folder.
        """
        self.shared.check()
        if not Path(self.folder).is_dir():
            raise UsageError(
                f"the working folder {self.folder} is not there",
                hint="start the command in a folder that all nodes see under the same path",
            )


class _Ranks:
    """The processes of the ranks. `out` is the file descriptor for lines."""

    def __init__(self, out: int) -> None:
        self.out, self.processes, self.tasks = out, {}, set()  # type: ignore[var-annotated]

    def tell(self, kind: Any, rank: int, value: Any) -> None:
        write_line(self.out, Message(0, kind, rank, value).encode())

    def do(self, request: Message) -> None:
        if request.kind == "start":
            task = asyncio.create_task(
                self._run(request.rank, request.value["words"], request.value["environment"])
            )
            self.tasks.add(task)
        elif request.kind == "order":
            self.signal(request.value)

    def signal(self, number: int) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    async def _run(self, rank: int, words: list[str], environment: dict[str, str]) -> None:
        # OMP_NUM_THREADS is of Ray's own making.
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                *words,
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
                env={**inherited, **environment},
            )
        except OSError as error:
            self.tell("report", rank, f"rank {rank} can't be started: {error}")
            self.tell("ended", rank, 1)
            return
        assert process.stdout is not None and process.stderr is not None
        self.processes[rank] = process
        relays = [self._relay(rank, process.stderr), self._forward(process.stdout)]
        tasks = [asyncio.create_task(relay) for relay in relays]
        code = await process.wait()
        await asyncio.wait(tasks, timeout=_PRINTED_S)
        del self.processes[rank]
        self.tell("ended", rank, code)

    async def _relay(self, rank: int, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            self.tell("report", rank, line.decode(errors="replace").rstrip("\n"))

    async def _forward(self, messages: asyncio.StreamReader) -> None:
        while (line := await messages.readline()).endswith(b"\n"):
            write_line(self.out, line.decode().rstrip("\n"))


async def serve() -> None:
    """Answer the greeting, then execute requests until stdin ends."""
    out = os.dup(1)
    os.dup2(2, 1)
    requests = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(requests), sys.stdin
    )
    line = await requests.readline()
    write_line(out, json.dumps(STARTED))
    try:
        greeting = TrainingGreeting.decode(line)
        greeting.check()
    except PacelineError as error:
        write_line(out, json.dumps({"error": error.args[0], "hint": error.hint}))
        return
    os.chdir(greeting.folder)
    write_line(out, json.dumps({"port": free_port()}))
    ranks = _Ranks(out)
    while line := await requests.readline():
        ranks.do(Message.decode(line))
    for process in ranks.processes.values():
        with suppress(ProcessLookupError):
            process.kill()


def free_port() -> int:
    """Return a port that is free on this host now.

    Raises:
        UsageError: no port is free.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise UsageError(f"none of the ports {_PORTS.start} to {_PORTS.stop - 1} is free")


if __name__ == "__main__":
    asyncio.run(serve())
