"""Runs a trainer's script on two ranks again and again. The ranks are forks of one process that has imported the
script, so a run of a second does not begin with ten seconds of imports.

    python -m benchmarks.trainers.ranks SCRIPT NUM_PROCESSES

reads the script's arguments as one line of JSON, and answers with one line: null, or why the run failed. Ranks get the
environment that torchrun gives.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

TIMEOUT_S = 60.0
GRACE_S = 5.0  # for the other ranks when one has failed, so that they too can say why
ERROR = re.compile(r"(?:\[rank\d+\]: *)?((?:[\w.]+\.)?\w*(?:Error|Exception|Refused)\b: .*)")
FOLLOWS = ("Connection closed by peer", "Connection reset by peer")  # of another rank's error


class Outcome(Enum):
    DONE = "done"
    FAILED = "failed"
    LATE = "late"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # some packages print while they are imported
    script = importlib.import_module(f"benchmarks.trainers.{sys.argv[1]}")
    importlib.import_module("torch._dynamo")  # the first optimizer of a process would import it
    for line in sys.stdin:
        print(
            json.dumps(run(script.main, json.loads(line), num_processes=int(sys.argv[2]))),
            file=answers,
        )


def run(body: Callable[[], None], arguments: Sequence[str], *, num_processes: int) -> str | None:
    """The body in this many forks, with these command line arguments; None, or why it failed."""
    with tempfile.TemporaryFile() as output:
        port = free_port()
        ranks = [
            fork(body, arguments, rank_environment(rank, num_processes, port), output.fileno())
            for rank in range(num_processes)
        ]
        outcome = wait(ranks)
        output.seek(0)
        printed = output.read().decode(errors="replace")
    if outcome is Outcome.LATE:
        return f"it did not end in {TIMEOUT_S:.0f} s"
    return first_error(printed) if outcome is Outcome.FAILED else None


def fork(
    body: Callable[[], None], arguments: Sequence[str], environment: Mapping[str, str], output: int
) -> int:
    """The process id of a fork that runs the body in a session of its own and prints to a file."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    exit_code = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        sys.argv[1:] = arguments
        body()
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def wait(ranks: Sequence[int]) -> Outcome:
    """Until all have ended. Those that are left after one has failed, or when time is up, are killed."""
    running, outcome, ends_s = set(ranks), Outcome.DONE, time.monotonic() + TIMEOUT_S
    while running and time.monotonic() < ends_s:
        for process in list(running):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                running.discard(process)
                if status and outcome is Outcome.DONE:
                    outcome, ends_s = Outcome.FAILED, min(ends_s, time.monotonic() + GRACE_S)
        time.sleep(0.02)
    for process in running:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return Outcome.LATE if running and outcome is Outcome.DONE else outcome


def rank_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What torchrun sets; nothing for a single process, which starts ranks itself."""
    if num_ranks == 1:
        return {}
    return {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "GROUP_RANK": "0",
        "WORLD_SIZE": f"{num_ranks}",
        "LOCAL_WORLD_SIZE": f"{num_ranks}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "TORCHELASTIC_RUN_ID": "trainers",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def first_error(output: str) -> str:
    """The first line that names an error; one that follows from another rank's is taken if there is no other.

    >>> first_error("RuntimeError: Connection closed by peer\\nValueError: too few samples\\n")
    'ValueError: too few samples'
    """
    lines = [line.strip() for line in output.splitlines()]
    errors = [match[1] for line in lines if (match := ERROR.match(line))]
    causes = [error for error in errors if not any(words in error for words in FOLLOWS)]
    aborts = [line.removeprefix("what():").strip() for line in lines if line.startswith("what():")]
    return (causes + aborts + errors + ["a rank ended without an error"])[0][:400]


if __name__ == "__main__":
    main()
