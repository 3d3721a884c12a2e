"""When a worker asks for the weights of its next order: never while those of the one before are on their way."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest

from paceline.servers.order_inbox import OrderInbox
from paceline.servers.wire import Closed


class Coordinator:
    """A connection on which orders come when a test sends them."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def send(self, version: int) -> None:
        self.messages.put({"lease": version, "version": version})

    def receive_message(self) -> dict[str, Any]:
        if (message := self.messages.get()) is None:
            raise Closed("the peer closed its connection")
        return message


class Arrivals:
    """Weights that are on their way until `arrive` is called; with a long `pull_s` an early request pays."""

    def __init__(self) -> None:
        self.requested_version = self.begun = self.settled = -1
        self.pull_s = 10.0
        self.requested_versions: list[int] = []
        self.on_their_way = False

    def ask(self, version: int) -> None:
        assert not self.on_their_way, (
            f"version {version} is asked for while {self.requested_version} is on its way"
        )
        self.requested_version, self.on_their_way = version, True
        self.requested_versions.append(version)

    def begin(self) -> None:
        self.begun = self.requested_version

    def arrive(self, inbox: OrderInbox) -> None:
        self.settled, self.on_their_way = self.begun, False
        inbox.settled()


def _heard(inbox: OrderInbox, wait_for: Callable[..., None], count: int) -> None:
    wait_for(lambda: len(inbox.orders) == count)


def _at_first_step(
    coordinator: Coordinator, arrivals: Arrivals, wait_for: Callable[..., None], *, takes_any: bool
) -> OrderInbox:
    """A worker's inbox in its first step, whose weights have come. Its second order is there."""
    inbox = OrderInbox(coordinator, arrivals, takes_any=takes_any, alive=lambda: None)  # type: ignore[arg-type]
    inbox.listen()
    coordinator.send(1)
    coordinator.send(2)
    inbox.fetch(inbox.next())
    _heard(inbox, wait_for, 1)
    arrivals.arrive(inbox)
    return inbox


@pytest.mark.parametrize("takes_any", [False, True])
def test_an_order_between_two_steps_asks_for_nothing(
    wait_for: Callable[..., None], takes_any: bool
):
    """It comes when the one before it was taken from the inbox, and its step has not begun."""
    coordinator, arrivals = Coordinator(), Arrivals()
    inbox = _at_first_step(coordinator, arrivals, wait_for, takes_any=takes_any)
    assert arrivals.requested_versions == [1, 2]  # the second as soon as the first is there
    order = inbox.next()
    coordinator.send(3)
    _heard(inbox, wait_for, 1)
    assert arrivals.requested_versions == [1, 2]
    inbox.fetch(order)
    assert arrivals.begun == 2
    arrivals.arrive(inbox)
    assert arrivals.requested_versions == [1, 2, 3]
    coordinator.messages.put(None)


def test_weights_that_come_quickly_are_asked_for_when_their_step_begins(
    wait_for: Callable[..., None],
):
    """Where any version will do, a later request gets fresher weights; a worker that waits asks at once."""
    coordinator, arrivals = Coordinator(), Arrivals()
    arrivals.pull_s = 0.0
    inbox = _at_first_step(coordinator, arrivals, wait_for, takes_any=True)
    assert arrivals.requested_versions == [1]
    inbox.fetch(inbox.next())
    assert arrivals.requested_versions == [1, 2]
    coordinator.messages.put(None)
    with pytest.raises(Closed):
        inbox.next()
