"""ZeroMQ: a ROUTER and its DEALERs, without copies into messages; with CURVE, encrypted and authenticated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import zmq
from torch import Tensor

from benchmarks.contenders.wires.rounds import ELEMENTS, PushPull, Seat, echo, main

CURVE = "curve"


@contextmanager
def server(seat: Seat) -> Iterator[None]:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    public = b""
    if seat.variant == CURVE:
        public, secret = zmq.curve_keypair()
        router.curve_server, router.curve_secretkey = True, secret
    port = router.bind_to_random_port("tcp://127.0.0.1")
    weights = torch.zeros(ELEMENTS)

    def talk() -> None:
        while True:
            waiting = []
            for _ in range(seat.clients):
                identity, frame = router.recv_multipart(copy=False)
                echo(
                    int(identity.bytes),
                    torch.frombuffer(frame.buffer, dtype=torch.float32),
                    weights,
                )
                waiting.append(identity.bytes)
            for identity in waiting:
                router.send_multipart([identity, memoryview(weights.numpy())], copy=False)

    threading.Thread(target=talk, daemon=True).start()
    store = seat.store()
    store.set("key", public)
    store.set("port", str(port))
    yield


@contextmanager
def client(seat: Seat, number: int, weights: Tensor) -> Iterator[PushPull]:
    store = seat.store()
    port = int(store.get("port"))
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.identity = str(number).encode()
    if seat.variant == CURVE:
        dealer.curve_serverkey = store.get("key")
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.connect(f"tcp://127.0.0.1:{port}")

    def push_pull(gradient: Tensor) -> None:
        dealer.send(memoryview(gradient.numpy()), copy=False)
        frame = dealer.recv(copy=False)
        weights.copy_(torch.frombuffer(frame.buffer, dtype=torch.float32))

    yield push_pull


if __name__ == "__main__":
    main(server, client, variants=(CURVE,))
