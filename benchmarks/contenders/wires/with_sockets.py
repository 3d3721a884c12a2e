"""Plain sockets: a thread for each peer, preallocated memory, eight bytes of length before each message.

Nothing is checked and no peer proves who it is: this is what the link and Python allow.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.contenders.wires.rounds import ELEMENTS, PushPull, Seat, echo, main

_LENGTH = struct.Struct(">Q")


def _send(sock: socket.socket, memory: memoryview) -> None:
    sock.sendall(_LENGTH.pack(len(memory)))
    sock.sendall(memory)


def _receive(sock: socket.socket, memory: memoryview) -> None:
    (length,) = _LENGTH.unpack(sock.recv(_LENGTH.size, socket.MSG_WAITALL))
    at = 0
    while at < length:
        got = sock.recv_into(memory[at:length])
        if got == 0:
            raise EOFError
        at += got


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")


@contextmanager
def server(seat: Seat) -> Iterator[None]:
    weights = torch.zeros(ELEMENTS)
    everyone = threading.Barrier(seat.clients)
    listener = socket.create_server(("127.0.0.1", 0), backlog=seat.clients)

    def talk(sock: socket.socket) -> None:
        gradient = torch.empty(ELEMENTS)
        (number,) = _LENGTH.unpack(sock.recv(_LENGTH.size, socket.MSG_WAITALL))
        while True:
            try:
                _receive(sock, _memory(gradient))
            except (EOFError, OSError, struct.error):
                return
            echo(number, gradient, weights)
            everyone.wait()
            _send(sock, _memory(weights))

    def welcome() -> None:
        for _ in range(seat.clients):
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=talk, args=(sock,), daemon=True).start()

    threading.Thread(target=welcome, daemon=True).start()
    seat.store().set("address", json.dumps(listener.getsockname()))
    yield


@contextmanager
def client(seat: Seat, number: int, weights: Tensor) -> Iterator[PushPull]:
    with socket.create_connection(tuple(json.loads(seat.store().get("address")))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(_LENGTH.pack(number))

        def push_pull(gradient: Tensor) -> None:
            _send(sock, _memory(gradient))
            _receive(sock, _memory(weights))

        yield push_pull


if __name__ == "__main__":
    main(server, client)
