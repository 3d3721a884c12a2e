"""Peers that come, leave or speak while server 0 does something else: nothing of it ends the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline as pl
from paceline.launch.process.context import RankContext
from paceline.launch.process.heartbeats import HeartbeatTable
from paceline.servers.coordinator import Coordinator
from paceline.servers.roles import RankTask, Rendezvous
from paceline.servers.server_state import build
from paceline.servers.wire import Closed, Peer, Role, Uplink
from paceline.strategies.plan import Plan
from paceline.training.settings import Settings


class Played:
    """A connection of the coordinator. is_open: whether its peer is there."""

    def __init__(self) -> None:
        self.is_open, self.messages = True, list[dict[str, Any]]()

    def send_message(self, message: dict[str, Any]) -> None:
        if not self.is_open:
            raise Closed("the connection broke while sending")
        self.messages.append(message)

    def close(self) -> None:
        self.is_open = False


WORKER = Peer(Role.CONTROL, 0, 7)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """Of a run with another server and worker 0, on no thread of its own."""
    plan = Plan.parse("servers=2 workers=2 staleness=inf")
    job = pl.Job(
        model=lambda: nn.Linear(4, 2),
        data=[(torch.ones(4), torch.ones(2))] * 8,
        validation=[(torch.ones(4), torch.ones(2))] * 8,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=4,
        steps=3,
    )
    context = RankContext(
        0,
        4,
        4,
        torch.device("cpu"),
        dist.HashStore(),
        HeartbeatTable(1),
        0,
        "try",
        secret=b"s" * 32,
        deaths=(0,) * 4,
    )
    model, shards = build(job, plan)
    task = RankTask(
        context, job, plan, Settings(None, (1, 1)), Rendezvous(context, "servers/1"), Uplink()
    )
    server = Coordinator(task, number=0, model=model, shards=shards)
    server.peers.followers_heard_s[1] = time.monotonic()
    for peer in (Peer(Role.SERVER, 1, 0), WORKER):
        _hear(server, peer, {"joined": Played()})
    yield server
    server.close()


def _hear(coordinator: Coordinator, peer: Peer, message: Any) -> None:
    coordinator.inbox.put((peer, message))
    coordinator.reception.hear()


def test_a_worker_s_sign_of_life_after_a_server_left(coordinator: Coordinator):
    """Workers give them on a thread of their own, and one may follow the worker's last word."""
    coordinator.reception.over = True
    coordinator.peers.followers[1].close()
    _hear(coordinator, Peer(Role.SERVER, 1, 0), {"left": {"peak_memory_bytes": 1.0}})
    _hear(coordinator, WORKER, {"alive": True})
    assert coordinator.peers.workers.keys() == {0}


def test_a_worker_that_comes_when_the_run_is_over(coordinator: Coordinator):
    """It is sent away, and its connection's end is nothing that servers, which may have left, need to know."""
    coordinator.reception.over = True
    coordinator.peers.followers[1].close()
    peer, control = Peer(Role.CONTROL, 1, 8), Played()
    _hear(coordinator, peer, {"joined": control})
    assert not control.is_open
    _hear(coordinator, peer, Closed("the peer closed its connection"))
    assert coordinator.peers.workers.keys() == {0}


def test_signs_of_life_while_a_worker_joins(coordinator: Coordinator):
    """They are given on another thread while this one hears a callback's question, and peers come and go."""
    told = Played()

    def send_message(message: dict[str, Any]) -> None:
        if not told.messages:
            told.messages.append(message)
            _hear(coordinator, Peer(Role.CONTROL, 1, 8), {"joined": Played()})

    coordinator.peers.workers[0].connection.send_message = send_message  # type: ignore[method-assign]
    coordinator.keep_alive()
    assert told.messages == [{"alive": True}] and coordinator.peers.workers.keys() == {0, 1}


class Asks:
    """Controls a run, and loses a worker while its callbacks are asked."""

    hooks = frozenset({"on_epoch_end", "on_evaluation"})

    def __init__(self, lose: Callable[[], None]) -> None:
        self.lose = lose

    def on_question(self, event: Mapping[str, Any], exchange: Any) -> dict[str, Any]:
        self.lose()
        return {}

    def tell_slow(self, after_s: float) -> None: ...


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_worker_lost_while_callbacks_hear_of_its_evaluation(
    coordinator: Coordinator, comes_back: bool
):
    """They may read the weights, and peers are heard until all servers have written theirs."""

    def lose() -> None:
        _hear(coordinator, WORKER, Closed("the peer closed its connection"))
        if comes_back:
            _hear(coordinator, replace(WORKER, incarnation=8), {"joined": Played()})

    coordinator.callbacks.controller = Asks(lose)  # type: ignore[assignment]
    sums = {"sums": 1, "names": ["loss"], "values": [[3.0, 2.0]], "refused": [], "stop": False}
    coordinator.inbox.put((WORKER, sums))
    coordinator.evaluations.evaluate()
    assert coordinator.log.evaluated == {"validation_loss": 1.5}
    assert [worker.orders for worker in coordinator.peers.workers.values()] == [1] * comes_back


def test_nobody_is_given_up_for_what_server_0_could_not_hear(coordinator: Coordinator):
    """A callback takes longer than the patience, and what a worker said meanwhile waits behind other messages."""
    worker = coordinator.peers.workers[0]

    def pass_time() -> None:
        worker.heard_s -= coordinator.context.timeout_s

    coordinator.callbacks.controller = Asks(pass_time)  # type: ignore[assignment]
    coordinator.run.due, coordinator.evaluations.ended_epochs = {"epoch"}, [0]
    coordinator._stop_here()
    coordinator.reception.give_up_silent()
    assert coordinator.peers.workers == {0: worker}
    pass_time()
    coordinator.reception.give_up_silent()
    assert not coordinator.peers.workers
