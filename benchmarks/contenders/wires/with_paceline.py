"""Paceline's own: what a run's servers and workers talk by, from the handshake on; with `sum`, as without staleness.

Without it a gradient is an update of its own, which nothing is added to.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from benchmarks.contenders.wires.rounds import ELEMENTS, PATIENCE_S, PushPull, Seat, echo, main
from paceline.strategies.server.run import Link, held
from paceline.strategies.server.serve import Door, Exchange
from paceline.strategies.server.shards import Shard, assign, fingerprint
from paceline.strategies.server.wire import Peer, Role, connect, listen

SUM = "sum"
LAYERS = 16
_ENDS = [ELEMENTS * number // LAYERS for number in range(LAYERS + 1)]


def _layers(flat: Tensor) -> dict[str, Tensor]:
    """The memory as a model's parameters."""
    return {f"layer{number}": flat[start:stop]
            for number, (start, stop) in enumerate(itertools.pairwise(_ENDS))}


def _parameters(flat: Tensor) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(layer) for name, layer in _layers(flat).items()}


def _shard() -> Shard:
    with torch.device("meta"):
        shard, = assign(held(_parameters(torch.empty(ELEMENTS))), 1, split_tensors=True)
    return shard


@contextmanager
def server(seat: Seat) -> Iterator[None]:
    shard, num_parts = _shard(), seat.clients if seat.variant == SUM else 1

    def complete(update: int, squares: float) -> None:
        last = exchange.gradients(update)[f"layer{LAYERS - 1}"]
        first = exchange.views["layer0"]
        if seat.variant == SUM:
            for number in range(seat.clients):
                echo(number, last / seat.clients, first)
        else:
            echo(update % seat.clients, last, first)
        exchange.made(update)

    exchange = Exchange(shard, num_parts=num_parts, keeps_sending=False, version=0, on_held=complete,
                        on_lost=lambda peer, error: None)
    secret = secrets.token_bytes(32)
    door = Door(listen("127.0.0.1"), exchange.serve, secret=secret, layout=fingerprint([shard]))
    store = seat.store()
    store.set("secret", secret.hex())
    store.set("address", json.dumps(door.address))
    yield
    door.close()
    exchange.close()


@contextmanager
def client(seat: Seat, number: int, weights: Tensor) -> Iterator[PushPull]:
    shard, store = _shard(), seat.store()
    address, secret = tuple(json.loads(store.get("address"))), bytes.fromhex(store.get("secret").decode())
    connection = connect(address, Peer(Role.DATA, number, 0), secret=secret, layout=fingerprint([shard]),
                         timeout_s=PATIENCE_S)
    link = Link(connection, shard, _parameters(weights), worker=number, incarnation=0)
    updates_a_round = 1 if seat.variant == SUM else seat.clients
    round = 0

    def push_pull(gradient: Tensor) -> None:
        nonlocal round
        layers = _layers(gradient)
        update = round if seat.variant == SUM else round * seat.clients + number
        round += 1
        for place, chunk in enumerate(shard.chunks):
            link.push(update, place, [layers[shard.slices[span.slice].name][span.start:span.stop]
                                      for span in chunk.spans])
        link.ask(round * updates_a_round)
        link.wait()

    yield push_pull
    link.close()


if __name__ == "__main__":
    main(server, client, variants=(SUM,))
