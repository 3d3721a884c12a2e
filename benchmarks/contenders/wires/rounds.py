"""The work that every wire does: one server, and clients that each push 25 MB and pull 25 MB a round.

A pull is answered when every client's push of the round is there, and leaves the weights in the client's own memory, as
a model's parameters lie. A wire is two context managers: `server(seat)` serves inside, on threads of its own, and
`client(seat, number, weights)` gives the function that pushes a gradient and has pulled the weights when it returns.

Processes are forks, so that only one of them imports torch, and CPU time is that of all of them and of what they start.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

ELEMENTS = 6_250_000  # 25 MB of float32
WARM_UP_ROUNDS = 3
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Seat:
    """What every process of a wire knows. folder: of this run alone, for files that they meet by."""

    clients: int
    folder: Path
    variant: str | None

    def store(self) -> dist.Store:
        """Where a server says what its clients must know."""
        store = dist.FileStore(str(self.folder / "store"), -1)
        store.set_timeout(timedelta(seconds=PATIENCE_S))
        return store


PushPull = Callable[[Tensor], None]
ServerOf = Callable[[Seat], AbstractContextManager[None]]
ClientOf = Callable[[Seat, int, Tensor], AbstractContextManager[PushPull]]


def echo(number: int, gradient: Tensor, weights: Tensor) -> None:
    """All that a server computes: a client finds the element of its gradient that has its number in the weights.

    So it knows that what it pulled was made of what it pushed.
    """
    weights[number] = gradient[number]


def measure(server: ServerOf, client: ClientOf, *, seat: Seat, rounds: int) -> dict[str, float]:
    """Bytes a second in both directions together, and CPU seconds of all processes for each gigabyte."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for number in range(-1, seat.clients):
        parent, child = context.Pipe()
        work = (
            (_serve, server, seat, child)
            if number < 0
            else (_push_pull, client, seat, child, number, rounds)
        )
        process = context.Process(target=_told, args=work)
        process.start()
        child.close()
        pipes.append(parent)
        processes.append(process)
    try:
        _hear(pipes)  # all are warm
        began_s, began_cpu_s = time.perf_counter(), _cpu_s()
        _say(pipes[1:])
        _hear(pipes[1:])
        spent_s, spent_cpu_s = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
        _say(pipes[1:])
        _hear(pipes[1:])  # clients leave before the server does
        _say(pipes[:1])
        _hear(pipes[:1])
        for process in processes:
            process.join(timeout=10)
    finally:
        for process in psutil.Process().children(recursive=True):  # none, unless something failed
            with suppress(psutil.NoSuchProcess):
                process.kill()
    moved = 2 * 4 * ELEMENTS * seat.clients * rounds
    return {"bytes_per_s": moved / spent_s, "cpu_s_per_gb": spent_cpu_s / (moved / 1e9)}


def _serve(server: ServerOf, seat: Seat, pipe: Connection) -> None:
    with server(seat):
        pipe.send(None)
        pipe.recv()
    pipe.send(None)


def _push_pull(client: ClientOf, seat: Seat, pipe: Connection, number: int, rounds: int) -> None:
    gradient, weights = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
    gradient[: seat.clients] = 0  # where a server that sums finds each client's alone

    def take(numbers: range) -> None:
        for round in numbers:
            gradient[number] = round
            push_pull(gradient)
            if weights[number] != round:
                raise RuntimeError(f"round {round} brought back {weights[number]}")

    with client(seat, number, weights) as push_pull:
        take(range(1, WARM_UP_ROUNDS + 1))
        pipe.send(None)
        pipe.recv()
        take(range(WARM_UP_ROUNDS + 1, WARM_UP_ROUNDS + 1 + rounds))
        pipe.send(None)
        pipe.recv()
    pipe.send(None)


def _told(work: Callable[..., None], *arguments: object) -> None:
    """Leave at once when it is done: threads that still wait for a peer would hold the process."""
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _hear(pipes: Sequence[Connection]) -> None:
    """Wait for a word from each process; EOFError if one is gone."""
    for pipe in pipes:
        if not pipe.poll(PATIENCE_S):
            raise TimeoutError(f"a process said nothing for {PATIENCE_S:.0f} s")
        pipe.recv()


def _say(pipes: Sequence[Connection]) -> None:
    for pipe in pipes:
        pipe.send(None)


def _cpu_s() -> float:
    """CPU time so far of this process and all below it."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(process_times.user + process_times.system for process_times in times)


def main(server: ServerOf, client: ClientOf, variants: Sequence[str] = ()) -> None:
    """The command of a wire: prints its figures as a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--variant", choices=variants)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(
        prefix="wire-"
    ) as folder:  # a short path: some put sockets there
        seat = Seat(options.clients, Path(folder), options.variant)
        figures = measure(server, client, seat=seat, rounds=options.rounds)
    print(json.dumps(figures), flush=True)
