"""Gloo: a process group of two ranks for each client and the server, so that one's death leaves the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders.wires.rounds import ELEMENTS, PATIENCE_S, PushPull, Seat, echo, main

SERVER, CLIENT = 0, 1


def _pair(seat: Seat, number: int, rank: int) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=PATIENCE_S)
    return dist.ProcessGroupGloo(dist.PrefixStore(f"pair/{number}", seat.store()), rank, 2, options)


@contextmanager
def server(seat: Seat) -> Iterator[None]:
    weights = torch.zeros(ELEMENTS)
    everyone = threading.Barrier(seat.clients)

    def talk(number: int) -> None:
        gradient = torch.empty(ELEMENTS)
        group = _pair(seat, number, SERVER)
        with suppress(RuntimeError):  # the client is gone
            while True:
                group.recv([gradient], CLIENT, 0).wait()
                echo(number, gradient, weights)
                everyone.wait()
                group.send([weights], CLIENT, 0).wait()

    for number in range(seat.clients):
        threading.Thread(target=talk, args=(number,), daemon=True).start()
    yield


@contextmanager
def client(seat: Seat, number: int, weights: Tensor) -> Iterator[PushPull]:
    group = _pair(seat, number, CLIENT)

    def push_pull(gradient: Tensor) -> None:
        group.send([gradient], SERVER, 0).wait()
        group.recv([weights], SERVER, 0).wait()

    yield push_pull


if __name__ == "__main__":
    main(server, client)
