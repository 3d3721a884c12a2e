"""`paceline` commands as forks of the test's process: they begin at once, as nothing is imported anew."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from conditions import PATIENCE_S

from tests.namespaces import NetworkHost


class Command:
    """A command that runs, with a session of its own. What it prints lies in two files of the folder.

    change_streams: called before the command reads or writes.
    """

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        *,
        host: NetworkHost | None = None,
        change_streams: Callable[[], None] | None = None,
    ) -> None:
        folder.mkdir()
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()  # what the test's process has left, such as Ray's, is not to be collected here
            if host is not None:
                host.enter()
            self._run(words, env, change_streams)

    def _run(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        change_streams: Callable[[], None] | None,
    ) -> None:
        code = 1
        try:
            os.setsid()
            for descriptor, file in ((1, self.stdout), (2, self.stderr)):
                os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), descriptor)
            if change_streams is not None:
                change_streams()
            sys.stdin, sys.stdout, sys.stderr = map(_stream, range(3), "rww")
            os.environ.clear()
            os.environ.update(env)
            sys.argv = ["paceline", *words]

            from paceline.cli import main

            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(AttributeError, OSError):  # it is closed, or has lost its reader
                sys.stdout.flush()
            os._exit(code)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code; a command that takes longer is killed."""
        until_s = time.monotonic() + timeout_s
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > until_s:
                os.killpg(self.pid, 9)
            time.sleep(0.02)


def _stream(number: int, mode: str) -> Any:
    """As an interpreter that starts has it: None where the descriptor is closed."""
    try:
        os.fstat(number)
    except OSError:
        return None
    return os.fdopen(number, mode, 1, closefd=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def as_ranks(
    words: Sequence[str], folder: Path, *, num_ranks: int = 2, hosts: Sequence[NetworkHost] = ()
) -> list[Command]:
    """The command once for each rank of this host, or on each of the hosts, told so as torchrun tells its own; and
    their ends are awaited."""
    size, of_host = str(len(hosts) or num_ranks), str(1 if hosts else num_ranks)
    common = {
        **os.environ,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": of_host,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    started = [
        Command(
            words,
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank % int(of_host))},
            folder / f"command-{rank}",
            host=hosts[rank] if hosts else None,
        )
        for rank in range(int(size))
    ]
    codes = [command.wait() for command in started]
    assert codes == [0] * len(started), "\n".join(command.stderr.read_text() for command in started)
    return started
