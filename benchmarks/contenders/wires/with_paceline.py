"""Paceline's own wire: what a run's servers and workers use, from the handshake on; with `sum`, as without staleness.

With `sum`, a layer's weights leave as soon as all clients have pushed its gradient. Otherwise a gradient is a separate
update, to which nothing is added, and weights leave when all of it is there. The optimizer is left out.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.contenders.wires.rounds import ELEMENTS, PATIENCE_S, PushPull, Seat, echo, main
from paceline.base.sockets import listen
from paceline.servers.acceptor import open_door
from paceline.servers.connection import Outgoing, ServerConnection, served_parameters
from paceline.servers.lazy_weights import WeightArrivals
from paceline.servers.serve import ShardEvents, ShardService, ShardTerms
from paceline.servers.session import serve
from paceline.servers.shard_memory import bytes_of
from paceline.servers.wire import Peer, Role, Uplink, connect
from paceline.strategies.server.shards import Shard, assign, fingerprint

SUM = "sum"
LAYERS = 16
FIRST = "layer0"
_ENDS = [ELEMENTS * number // LAYERS for number in range(LAYERS + 1)]


def _layers(flat: Tensor) -> dict[str, Tensor]:
    """The memory as a model's parameters."""
    return {
        f"layer{number}": flat[start:stop]
        for number, (start, stop) in enumerate(itertools.pairwise(_ENDS))
    }


def _parameters(flat: Tensor) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(layer) for name, layer in _layers(flat).items()}


def _shard() -> Shard:
    with torch.device("meta"):
        (shard,) = assign(served_parameters(_parameters(torch.empty(ELEMENTS))), 1)
    return shard


@contextmanager
def server(seat: Seat) -> Iterator[None]:
    shard, sums = _shard(), seat.variant == SUM

    def ready(gradients: Mapping[str, Tensor], scale: float) -> None:
        for number in range(seat.clients if FIRST in gradients else 0):
            echo(number, gradients[FIRST], exchange.views[FIRST])

    def complete(update: int, squares: float) -> None:
        if not sums:
            echo(update % seat.clients, exchange.gradients(update)[0][FIRST], exchange.views[FIRST])
        exchange.made(update)
        if sums:
            exchange.open(update + 1, 1.0)

    def failed(error: Exception) -> None:
        raise error

    exchange = ShardService(
        shard,
        ShardTerms(seat.clients if sums else 1, end=2**63),
        ShardEvents(complete=complete, ready=ready, lost=lambda peer, error: None, failed=failed),
        Uplink(),
    )
    if sums:
        exchange.open(0, 1.0)
    secret = secrets.token_bytes(32)
    door = open_door(
        listen("127.0.0.1"), partial(serve, exchange), secret=secret, layout=fingerprint([shard])
    )
    store = seat.store()
    store.set("secret", secret.hex())
    store.set("address", json.dumps(door.address))
    yield
    door.close()
    exchange.close()


@contextmanager
def client(seat: Seat, number: int, weights: Tensor) -> Iterator[PushPull]:
    shard, store = _shard(), seat.store()
    address, secret = (
        tuple(json.loads(store.get("address"))),
        bytes.fromhex(store.get("secret").decode()),
    )
    connection = connect(
        address,
        Peer(Role.DATA, number, 0),
        secret=secret,
        layout=fingerprint([shard]),
        timeout_s=PATIENCE_S,
    )
    sums, round = seat.variant == SUM, 0
    link = ServerConnection(connection, shard, worker=number, incarnation=0, uplink=Uplink())
    arrivals = WeightArrivals(_parameters(weights), [link])

    def push_pull(gradient: Tensor) -> None:
        nonlocal round
        layers = _layers(gradient)
        for place, chunk in enumerate(shard.chunks):
            link.push(
                round if sums else round * seat.clients + number,
                place,
                [
                    Outgoing(
                        bytes_of(layers[shard.slices[span.slice].name][span.start : span.stop])
                    )
                    for span in chunk.spans
                ],
                is_whole=True,
            )
        round += 1
        arrivals.ask(round if sums else round * seat.clients)
        arrivals.begin()
        arrivals.settle()

    yield push_pull
    link.close()


if __name__ == "__main__":
    main(server, client, variants=(SUM,))
