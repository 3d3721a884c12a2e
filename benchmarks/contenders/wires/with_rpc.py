"""torch.distributed.rpc: a call carries a gradient, and its future brings the weights when all clients have called.

Between processes of one host TensorPipe chooses shared memory by itself; with `tcp` it goes through the link too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from benchmarks.contenders.wires.rounds import ELEMENTS, PATIENCE_S, PushPull, Seat, echo, main

TCP = "tcp"


class Served:
    """What the server's process holds; calls find it by `HERE`."""

    def __init__(self, clients: int) -> None:
        self.clients, self.weights = clients, torch.zeros(ELEMENTS)
        self.lock = threading.Lock()
        self.waiting: list[torch.futures.Future[Tensor]] = []


HERE: list[Served] = []


@rpc.functions.async_execution
def push_pull_at_server(number: int, gradient: Tensor) -> torch.futures.Future[Tensor]:
    served, mine = HERE[0], torch.futures.Future()
    with served.lock:
        echo(number, gradient, served.weights)
        served.waiting.append(mine)
        if len(served.waiting) < served.clients:
            return mine
        everyone, served.waiting = served.waiting, []
    for future in everyone:
        future.set_result(served.weights)
    return mine


def _join(seat: Seat, name: str, rank: int) -> None:
    transport_options = (
        {"_transports": ["uv"], "_channels": ["basic"]} if seat.variant == TCP else {}
    )
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{seat.folder}/rpc", rpc_timeout=PATIENCE_S, **transport_options
    )
    rpc.init_rpc(name, rank=rank, world_size=seat.clients + 1, rpc_backend_options=options)


@contextmanager
def server(seat: Seat) -> Iterator[None]:
    HERE.append(Served(seat.clients))
    _join(seat, "server", 0)
    yield


@contextmanager
def client(seat: Seat, number: int, weights: Tensor) -> Iterator[PushPull]:
    _join(seat, f"client{number}", number + 1)

    def push_pull(gradient: Tensor) -> None:
        weights.copy_(rpc.rpc_sync("server", push_pull_at_server, args=(number, gradient)))

    yield push_pull


if __name__ == "__main__":
    main(server, client, variants=(TCP,))
