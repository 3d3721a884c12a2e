"""Ray: the server is an actor; gradients and weights go through the object store, which hosts share in memory."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.contenders.wires.rounds import ELEMENTS, PushPull, Seat, main

_STORE_BYTES = 2 * 10**9


class Served:
    """An actor whose calls return the weights when all clients have called."""

    def __init__(self, clients: int) -> None:
        self.clients, self.weights = clients, np.zeros(ELEMENTS, np.float32)
        self.arrived, self.changed = 0, asyncio.Event()

    async def push_pull(self, number: int, gradient: Any) -> Any:
        self.weights[number] = gradient[number]
        self.arrived += 1
        if self.arrived == self.clients:
            self.arrived = 0
            everyone, self.changed = self.changed, asyncio.Event()
            everyone.set()
        else:
            await self.changed.wait()
        return self.weights


@contextmanager
def server(seat: Seat) -> Iterator[None]:
    import ray

    context = ray.init(
        include_dashboard=False,
        object_store_memory=_STORE_BYTES,
        namespace="wire",
        log_to_driver=False,
        logging_level="error",
        num_cpus=1,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(seat.folder / "ray"),
    )
    actor = (
        ray.remote(num_cpus=0, max_concurrency=seat.clients)(Served)
        .options(name="server")
        .remote(seat.clients)
    )
    ray.get(actor.__ray_ready__.remote())
    seat.store().set("address", context.address_info["gcs_address"])
    yield
    ray.shutdown()


@contextmanager
def client(seat: Seat, number: int, weights: Tensor) -> Iterator[PushPull]:
    import ray

    address = seat.store().get("address").decode()
    ray.init(address=address, namespace="wire", log_to_driver=False, logging_level="error")
    actor = ray.get_actor("server")

    def push_pull(gradient: Tensor) -> None:
        pulled = ray.get(actor.push_pull.remote(number, gradient.numpy()))
        np.copyto(weights.numpy(), pulled)

    yield push_pull
    ray.shutdown()


if __name__ == "__main__":
    # The processes are drivers of their own on one cluster, which lets nobody in without its token. Ray reads these as
    # it is imported; it is imported here, so that the forks have it.
    os.environ.update(
        RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0"
    )
    import ray  # noqa: F401

    main(server, client)
