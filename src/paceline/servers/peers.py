"""Who takes part in a run with servers, as server 0 knows it."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.base.errors import PeerLost
from paceline.launch.process.context import RankContext
from paceline.servers.acceptor import listen_to
from paceline.servers.messages import checked
from paceline.servers.wire import Connection, Event, Peer, Role, WireError
from paceline.strategies.server.keys import Servers


@dataclass
class _Worker:
    """What server 0 knows of a worker.

    orders: that it has yet to answer; it is given none before it has said that it is ready.
    heard_s: when it last gave a sign of life.
    """

    connection: Connection
    incarnation: int
    orders: int = 1
    heard_s: float = field(default_factory=time.monotonic)


class Peers:
    """Workers and other servers. What they say comes into the inbox, and at last why they say no more."""

    def __init__(
        self, context: RankContext, sync: Servers, inbox: queue.SimpleQueue[Event]
    ) -> None:
        self.context, self.sync, self.inbox = context, sync, inbox
        self.workers: dict[int, _Worker] = {}
        self.joined: set[Peer] = set()  # every worker that ever was
        self.followers: dict[int, Connection] = {}  # the other servers
        self.followers_heard_s: dict[int, float] = {}
        self.alive_s = 0.0  # when workers last heard of this server
        self.deserted_s: float | None = None  # since when there is no worker

    @property
    def lacks_followers(self) -> bool:
        """Whether some other server has yet to join."""
        return len(self.followers) < self.sync.servers - 1

    def is_current(self, worker: int, incarnation: int) -> bool:
        return worker in self.workers and self.workers[worker].incarnation == incarnation

    def check_server(self, peer: Peer) -> None:
        """
        Raises:
            WireError: there is no such server, or it is here already.
        """
        if not 0 < peer.number < self.sync.servers or peer.number in self.followers_heard_s:
            raise WireError(
                f"a peer says that it is server {peer.number}, which is here already or none of "
                f"servers={self.sync.servers}"
            )

    def listen(self, connection: Connection, peer: Peer) -> None:
        """A peer has proved itself: hear it from now on."""

        def hear(sender: Peer, message: dict[str, Any] | WireError) -> None:
            if not isinstance(message, WireError):
                message = checked(sender.role, message)
            if sender.role == Role.SERVER:  # as it comes: the main thread may be busy for long
                self.followers_heard_s[sender.number] = time.monotonic()
            self.inbox.put((sender, message))

        if peer.role == Role.SERVER:
            self.followers_heard_s[peer.number] = time.monotonic()
        self.inbox.put((peer, {"joined": connection}))
        listen_to(connection, peer, hear)

    def add_worker(self, peer: Peer, connection: Connection) -> None:
        self.joined.add(peer)
        self.workers[peer.number] = _Worker(connection, peer.incarnation)
        self.deserted_s = None

    def remove_worker(self, number: int) -> None:
        self.workers.pop(number).connection.close()
        if not self.workers:
            self.deserted_s = time.monotonic()

    def say(self, worker: int, message: dict[str, Any]) -> None:
        """Give a worker an order. If it is gone, its connection's end is in the inbox."""
        member = self.workers[worker]
        if not member.orders:
            member.heard_s = time.monotonic()
        member.orders += 1
        try:
            member.connection.send_message(message)
        except WireError as error:
            self.inbox.put((Peer(Role.CONTROL, worker, member.incarnation), error))

    def tell_workers(self, message: dict[str, Any]) -> None:
        for worker in list(self.workers.values()):
            with suppress(WireError):  # its end is in the inbox
                worker.connection.send_message(message)

    def tell_followers(self, do: str, **values: Any) -> None:
        """Have every other server do something; see `Server.orders`."""
        for connection in self.followers.values():
            connection.send_message({"do": do, **values})

    def tell_workers_alive(self) -> None:
        """Let workers know, now and then, that they wait for good reason."""
        if time.monotonic() - self.alive_s > self.context.timeout_s / 8:
            self.alive_s = time.monotonic()
            self.tell_workers({"alive": True})

    def tell_followers_alive(self) -> None:
        for connection in list(self.followers.values()):
            with suppress(WireError):  # its end is in the inbox, or it was sent home
                connection.send_message({"alive": True})

    def excuse_silence(self) -> None:
        """Nobody was heard for a while: what workers said is in the inbox."""
        for worker in self.workers.values():
            worker.heard_s = time.monotonic()

    def silent(self) -> Iterator[tuple[Peer, WireError]]:
        """Yield workers that stall, which are as good as gone, before those who wait for them give up.

        Raises:
            WireError: all workers are gone, and none came, or came back.
            PeerLost: a server stalls, which all wait for.
        """
        patience_s = self.context.timeout_s / 2
        for number in self.followers:
            if time.monotonic() - self.followers_heard_s[number] > patience_s / 2:
                raise PeerLost(
                    f"server {number} has said nothing for {patience_s / 2:g} s",
                    rank=number,
                    hint="--timeout SECONDS allows longer pauses",
                )
        may_come = (
            self.context.restarts or len({peer.number for peer in self.joined}) < self.sync.workers
        )
        if self.deserted_s is not None and (
            not may_come or time.monotonic() - self.deserted_s > patience_s
        ):
            raise WireError(
                "all workers are gone", hint="--resume goes on from the last checkpoint"
            )
        for number, worker in list(self.workers.items()):
            if worker.orders and time.monotonic() - worker.heard_s > patience_s:
                yield (
                    Peer(Role.CONTROL, number, worker.incarnation),
                    WireError(f"it has said nothing for {patience_s:g} s"),
                )

    def close(self) -> None:
        for worker in self.workers.values():
            worker.connection.close()  # the process may live on, as a worker
        for connection in self.followers.values():
            connection.close()
