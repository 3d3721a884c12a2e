"""A server among strangers: whatever they send is refused, and workers are served as before."""

from __future__ import annotations

import errno
import json
import os
import queue
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conditions import PATIENCE_S, until
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base.sockets import listen
from paceline.launch.collectives.memory import own_memory
from paceline.servers import shared as servers_shared
from paceline.servers import wire
from paceline.servers.acceptor import open_door
from paceline.servers.connection import Pusher, ServerConnection
from paceline.servers.lazy_weights import WeightArrivals
from paceline.servers.serve import ShardEvents, ShardService, ShardTerms
from paceline.servers.session import serve
from paceline.servers.shard_memory import bytes_of
from paceline.servers.wire import (
    Closed,
    Connection,
    Header,
    Kind,
    Peer,
    Role,
    Uplink,
    WireError,
    connect,
)
from paceline.strategies.server.shards import ServedParameter, assign, fingerprint

SECRET = b"s" * 32
MODEL = [
    ServedParameter("a", (7, 3), "float32", 4),
    ServedParameter("b", (5,), "float64", 8),
    ServedParameter("c", (4,), "bfloat16", 2),
]
(SHARD,) = assign(MODEL, 1, chunk_bytes=32)
LAYOUT = fingerprint([SHARD])
WORKER = Peer(Role.DATA, 0, 77)


_OPEN: list[Connection] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """No socket of a test outlives it."""
    yield
    while _OPEN:
        _OPEN.pop().close()


def _kept(sock: socket.socket) -> Connection:
    _OPEN.append(Connection(sock))
    return _OPEN[-1]


class Served:
    """A server with what it says on queues."""

    def __init__(self, num_parts: int = 1) -> None:
        self.completed: queue.Queue[tuple[int, float]] = queue.Queue()
        self.lost: queue.Queue[tuple[Peer, WireError]] = queue.Queue()
        self.failed: queue.Queue[Exception] = queue.Queue()
        self.exchange = ShardService(
            SHARD,
            ShardTerms(num_parts, end=100, keeps_sending=True, measures=True),
            ShardEvents(
                complete=lambda *told: self.completed.put(told),
                ready=lambda gradients, scale: None,
                lost=lambda *told: self.lost.put(told),
                failed=self.failed.put,
            ),
            Uplink(),
        )
        self.door = open_door(
            listen("127.0.0.1"),
            partial(serve, self.exchange),
            secret=SECRET,
            layout=LAYOUT,
        )
        for view in self.exchange.views.values():
            view.fill_(1.5)

    def reach(
        self, peer: Peer = WORKER, *, secret: bytes = SECRET, layout: bytes = LAYOUT
    ) -> Connection:
        _OPEN.append(
            connect(
                self.door.address,
                peer,
                secret=secret,
                layout=layout,
                timeout_s=PATIENCE_S,
            )
        )
        return _OPEN[-1]

    def loses(self) -> tuple[Peer, WireError]:
        """Who is gone next, once it may come back: that is a moment after it was told."""
        peer, error = self.lost.get(timeout=PATIENCE_S)
        until(lambda: peer not in self.exchange.connections, tell=lambda: peer)
        return peer, error

    def close(self) -> None:
        self.door.close()
        self.exchange.close()


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.close()


def _parameters() -> dict[str, torch.nn.Parameter]:
    return {
        parameter.name: torch.nn.Parameter(
            torch.zeros(parameter.shape, dtype=getattr(torch, parameter.dtype))
        )
        for parameter in MODEL
    }


def _pull(parameters: dict[str, torch.nn.Parameter], link: ServerConnection) -> int:
    arrivals = WeightArrivals(parameters, [link])
    arrivals.ask(0)
    arrivals.begin()
    arrivals.settle()
    return arrivals.version


def _works(served: Served, update: int = 0) -> None:
    """A worker fetches weights and brings a gradient."""
    parameters = _parameters()
    link = ServerConnection(served.reach(), SHARD, worker=0, incarnation=77, uplink=Uplink())
    assert _pull(parameters, link) == 0
    assert all(bool((p == 1.5).all()) for p in parameters.values())
    pusher = Pusher(parameters, [link], lambda: None)
    pusher.update = update
    pusher.begin(last=True)
    sum((p.float() * 2).sum() for p in parameters.values()).backward()  # type: ignore[union-attr]
    pusher.finish()
    assert served.completed.get(timeout=PATIENCE_S) == (update, 4.0 * (21 + 5 + 4))
    assert all(bool((g == 2).all()) for g in served.exchange.gradients(update)[0].values())
    served.exchange.drop(update)
    link.close()
    assert served.loses()[0] == WORKER


def test_a_worker_pushes_and_pulls(served: Served):
    """Every dtype, in chunks that cut parameters; parameters of any memory format are filled."""
    _works(served)
    parameters = _parameters()
    parameters["a"] = torch.nn.Parameter(torch.zeros(3, 7).t())
    link = ServerConnection(served.reach(), SHARD, worker=0, incarnation=77, uplink=Uplink())
    served.exchange.views["a"].copy_(torch.arange(21.0).view(7, 3))
    _pull(parameters, link)
    assert torch.equal(parameters["a"].detach(), torch.arange(21.0).view(7, 3))
    link.close()


def test_without_shared_memory_elements_travel_in_frames(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(servers_shared, "mapped", lambda address: None)
    link = ServerConnection(served.reach(), SHARD, worker=0, incarnation=77, uplink=Uplink())
    assert link.shared is None
    link.close()
    assert served.loses()[0] == WORKER
    _works(served)


def test_memory_is_shared_with_whoever_offers_it_alone(served: Served):
    """Of another process, or cut short: declined."""
    connection = served.reach()
    assert servers_shared.offer(connection, [chunk.num_bytes for chunk in SHARD.chunks]) is not None
    mark, descriptor = secrets.randbits(62), os.memfd_create("short")
    os.write(descriptor, mark.to_bytes(8) + bytes(4096))
    other = served.reach(Peer(Role.DATA, 1, 77))
    for process, number in ((os.getpid(), descriptor), (2**40, 3), (os.getpid(), 0)):
        data = struct.pack(">QIQQ", process, number, mark, 4096)
        other.send(Header(Kind.OFFER, len(data)), data)
        assert other.receive().kind == Kind.DECLINED
    os.close(descriptor)


def test_a_host_without_room_for_shared_memory(served: Served, monkeypatch: pytest.MonkeyPatch):
    """Elements travel in frames."""

    def refuse(*given: Any) -> int:
        raise OSError(errno.ENOMEM, "no room")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    link = ServerConnection(served.reach(), SHARD, worker=0, incarnation=77, uplink=Uplink())
    assert link.shared is None
    link.close()
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert served.loses()[0] == WORKER
    _works(served)


def test_a_gradient_waits_in_shared_memory_until_it_is_taken():
    """The next one must travel in a frame."""
    memory = own_memory()
    assert memory is not None
    start = memory.reserve(4096)
    assert start is not None
    shared = servers_shared.Shared(memory, start, [5, 70])
    taken = memoryview(bytearray(5))
    assert shared.put(0, [memoryview(b"abc"), memoryview(b"de")])
    assert not shared.put(0, [memoryview(b"fghij")])
    assert shared.put(1, [memoryview(bytes(70))])
    shared.take(0, taken)
    assert taken == b"abcde"
    with pytest.raises(WireError, match="chunk 0 is in shared memory, and it is not"):
        shared.take(0, taken)
    assert shared.put(0, [memoryview(b"fghij")])


def test_parts_are_summed_in_their_order():
    """Whoever is last, and the sum waits for all."""
    served = Served(num_parts=2)
    links = [served.reach(Peer(Role.DATA, worker, 5)) for worker in (0, 1)]
    for worker in (1, 0):
        assert served.completed.empty()
        for number, chunk in enumerate(SHARD.chunks):
            values = torch.full(
                (chunk.stop - chunk.start,), 1.0 + worker, dtype=getattr(torch, chunk.dtype)
            )
            links[worker].send(
                Header(Kind.PUSH, chunk.num_bytes, chunk.dtype, worker, 5, 9, number),
                bytes_of(values),
            )
        time.sleep(0.05)
    assert served.completed.get(timeout=PATIENCE_S)[0] == 9
    assert all(bool((g == 3).all()) for g in served.exchange.gradients(9)[0].values())
    served.close()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"secret": b"x" * 32}, "PACELINE_SECRET must be equal on all hosts"),
        ({"layout": b"y" * 32}, "cuts the model in another way"),
    ],
)
def test_a_peer_that_does_not_belong(served: Served, changes: dict[str, Any], why: str):
    """Refused in words, and the next one is served."""
    with pytest.raises(WireError, match=why):
        served.reach(**changes)
    _works(served)


def test_another_version():
    """Of the frames, which is named."""
    head = bytearray(Header(Kind.PULL).pack())
    struct.pack_into(">H", head, 4, wire.VERSION + 1)
    with pytest.raises(WireError, match=f"version {wire.VERSION + 1}"):
        Header.unpack(bytes(head))


_CHUNK = SHARD.chunks[0]
_GOOD = {"kind": Kind.PUSH, "length": _CHUNK.num_bytes, "dtype": _CHUNK.dtype, "incarnation": 77}


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({**_GOOD, "length": 2**62}, f"where {_CHUNK.num_bytes} are allowed"),
        ({**_GOOD, "length": _CHUNK.num_bytes - 1}, f"where {_CHUNK.num_bytes} are allowed"),
        ({**_GOOD, "chunk": 10**6}, "sent chunk 1000000 of"),
        ({**_GOOD, "dtype": "complex64"}, "where bfloat16 is due"),
        ({**_GOOD, "worker": 3}, "sent a gradient as worker 3"),
        ({**_GOOD, "incarnation": 1}, "sent a gradient as worker 0"),
        ({"kind": Kind.WEIGHTS}, "sent WEIGHTS to a server"),
        ({"kind": Kind.PULL, "length": 5}, "PULL of 5 bytes"),
    ],
)
def test_a_worker_that_breaks_the_rules(served: Served, header: dict[str, Any], why: str):
    """Its connection ends, whoever coordinates learns why, nothing is allocated for it, others are served."""
    connection = served.reach()
    connection.send(Header(**header))
    peer, error = served.loses()
    assert peer == WORKER and why in str(error)
    _works(served)


def test_a_chunk_twice_and_a_chunk_cut_off(served: Served):
    """Neither is added to a gradient."""
    for payloads, why in (
        ([_CHUNK.num_bytes] * 2, "chunk 0 of update 4 twice"),
        ([3], "after 3 of 8 bytes"),
    ):
        connection = served.reach()
        for size in payloads:
            connection.send(Header(**_GOOD, step=4), bytes(size))
        if len(payloads) == 1:
            connection.close()
        assert why in str(served.loses()[1])
        served.exchange.drop(4)
        connection.close()
        served.exchange.closed.discard(4)
    assert served.completed.empty()
    _works(served)


def test_chunks_of_a_dropped_update(served: Served):
    """They are read and thrown away, and the worker goes on."""
    served.exchange.drop(3)
    connection = served.reach()
    for number, chunk in enumerate(SHARD.chunks):
        connection.send(
            Header(Kind.PUSH, chunk.num_bytes, chunk.dtype, 0, 77, 3, number),
            bytes(chunk.num_bytes),
        )
    connection.send(Header(Kind.PULL))
    assert connection.receive().kind == Kind.WEIGHTS
    assert served.completed.empty() and not served.exchange.gatherings
    connection.close()


def test_messages_that_are_too_long_or_no_messages():
    """Their length is checked before it is believed."""
    receiver, sender = _pair()
    sender.send(Header(Kind.MESSAGE, wire.DOCUMENT_BYTES + 1))
    with pytest.raises(WireError, match="bytes where 0 to"):
        receiver.receive_message()
    for text, why in ((b"{no", "no JSON"), (json.dumps([1]).encode(), "that is a list")):
        receiver, sender = _pair()
        sender.send(Header(Kind.MESSAGE, len(text)), text)
        with pytest.raises(WireError, match=why):
            receiver.receive_message()


def _pair() -> tuple[Connection, Connection]:
    with listen("127.0.0.1") as sock:
        client = socket.create_connection(sock.getsockname()[:2])
        return _kept(sock.accept()[0]), _kept(client)


def test_versions_are_waited_for(served: Served):
    """Weights that are not there yet come when they are."""
    connection = served.reach()
    connection.sock.settimeout(0.3)
    connection.send(Header(Kind.PULL, step=1))
    with pytest.raises(WireError):
        connection.receive()
    connection.sock.settimeout(PATIENCE_S)
    served.exchange.made(0)
    assert connection.receive().step == 1
    connection.close()


def test_a_worker_that_is_given_up_as_it_is_let_in(served: Served, monkeypatch: pytest.MonkeyPatch):
    """What else is done to its connection is done before anybody may close it."""
    served.exchange.terms = replace(served.exchange.terms, keeps_sending=False)
    server_end, worker_end = _pair()
    prioritise = server_end.prioritise

    def give_up(priority: int) -> None:
        served.exchange.dismiss(WORKER.number, WORKER.incarnation, keeps=[])
        prioritise(priority)

    monkeypatch.setattr(server_end, "prioritise", give_up)
    serve(served.exchange, server_end, WORKER)
    worker_end.sock.settimeout(PATIENCE_S)
    with pytest.raises(Closed):
        worker_end.receive()
    assert not served.exchange.connections


class Slowly(list[int]):
    """Takes its time when an element is looked at."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.001)
        return super().__getitem__(index)


def test_a_worker_that_asks_anew_before_it_has_all(served: Served):
    """It gets chunks anew, and what it says while one is chosen does the server no harm."""
    served.exchange.versions = Slowly(served.exchange.versions)
    connection = served.reach()
    connection.sock.settimeout(PATIENCE_S)
    for _ in range(10):
        connection.send(Header(Kind.PULL))
        header = connection.receive()
        assert header.kind == Kind.WEIGHTS
        connection.read_into(memoryview(bytearray(header.length)))
    connection.close()
    assert served.loses()[0] == WORKER and served.failed.empty()


(TABLED,) = assign(MODEL, 1, chunk_bytes=32, tables=[ServedParameter("t", (9, 2), "float32", 4)])
_ROW_BYTES = 8 + 2 * 4


class Attacked:
    """A server with a table. Who breaks the rules is given up, as a coordinator does."""

    def __init__(self) -> None:
        self.completed: queue.Queue[int] = queue.Queue()
        self.failed: queue.Queue[Exception] = queue.Queue()
        self.exchange = ShardService(
            TABLED,
            ShardTerms(1, end=100, keeps_sending=True, measures=True),
            ShardEvents(
                complete=lambda update, squares: self.completed.put(update),
                ready=lambda gradients, scale: None,
                lost=lambda peer, error: self.exchange.dismiss(
                    peer.number, peer.incarnation, keeps=[]
                ),
                failed=self.failed.put,
            ),
            Uplink(),
        )
        for view in self.exchange.views.values():
            view.fill_(1.0)
        self.door = open_door(
            listen("127.0.0.1"),
            partial(serve, self.exchange),
            secret=SECRET,
            layout=fingerprint([TABLED]),
        )
        self.incarnations = iter(range(10**9))

    def reach(self) -> tuple[Connection, int]:
        incarnation = next(self.incarnations)
        connection = connect(
            self.door.address,
            Peer(Role.DATA, 0, incarnation),
            secret=SECRET,
            layout=fingerprint([TABLED]),
            timeout_s=PATIENCE_S,
        )
        connection.sock.settimeout(10)
        return connection, incarnation

    def works(self, update: int) -> None:
        """A worker fetches weights and rows, and brings a gradient."""
        connection, incarnation = self.reach()
        connection.send(Header(Kind.PULL, worker=0, incarnation=incarnation))
        for _ in TABLED.chunks:
            header = connection.receive()
            assert header.kind == Kind.WEIGHTS
            connection.read_into(memoryview(bytearray(header.length)))
        for frame in _frames(incarnation, update):
            connection.send(*frame)
        while self.completed.get(timeout=PATIENCE_S) != update:  # a stranger's was complete
            pass
        assert self.failed.empty()
        assert all(
            bool((g.to_dense() == 0).all()) for g in self.exchange.gradients(update)[0].values()
        )
        self.exchange.drop(update)
        connection.close()
        # Nothing is left of anybody.
        until(lambda: not self.exchange.gatherings and not self.exchange.connections)


@pytest.fixture(scope="module")
def attacked() -> Iterator[Attacked]:
    server = Attacked()
    yield server
    server.door.close()
    server.exchange.close()


def _frames(incarnation: int, update: int) -> list[tuple[Header, bytes]]:
    """Everything that a worker sends in a step but its question for weights."""
    ids = bytes_of(torch.arange(3)).tobytes()
    rows = ids + bytes(3 * (_ROW_BYTES - 8))
    return [
        *(
            (
                Header(Kind.PUSH, chunk.num_bytes, chunk.dtype, 0, incarnation, update, number),
                bytes(chunk.num_bytes),
            )
            for number, chunk in enumerate(TABLED.chunks)
        ),
        (Header(Kind.PULL_ROWS, len(ids), "none", 0, incarnation, 0, 0), ids),
        (Header(Kind.PUSH_ROWS, len(rows), "float32", 0, incarnation, update, 0), rows),
    ]


_numbers = st.integers(0, 12) | st.integers(0, 2**32 - 1)
_headers = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(Kind),
        "dtype": st.sampled_from(wire.DTYPES),
        "worker": _numbers,
        "incarnation": _numbers,
        "chunk": _numbers,
        "step": st.integers(-1, 12) | st.integers(-(2**63), 2**63 - 1),
        "length": st.integers(0, 60) | st.integers(0, 2**64 - 1),
    },
)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150)
def test_a_worker_that_sends_anything_for_longer(attacked: Attacked, data: st.DataObject):
    _send_anything(attacked, data)


@given(st.data())
@settings(max_examples=30)
def test_a_worker_that_sends_anything(attacked: Attacked, data: st.DataObject):
    """Frames with fields, bytes and ends that are changed: its connection ends and another's update goes through."""
    _send_anything(attacked, data)


def _send_anything(attacked: Attacked, data: st.DataObject) -> None:
    sent = []
    for number in data.draw(st.lists(st.integers(0, len(TABLED.chunks) + 1), max_size=12)):
        changes = data.draw(st.just({}) | _headers)
        places = data.draw(
            st.just([]) | st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=2)
        )
        sent.append(
            (
                number,
                changes,
                places,
                data.draw(st.just(None) | st.integers(0, 60)),
                data.draw(st.just(b"") | st.binary(max_size=9)),
            )
        )
    update = data.draw(st.integers(0, 3))
    connection, incarnation = attacked.reach()
    try:
        for number, changes, places, end, rest in sent:
            header, payload = _frames(incarnation, update)[number]
            frame = bytearray(replace(header, **changes).pack() + payload)
            for place, value in places:
                frame[place % len(frame)] = value
            connection.sock.sendall(bytes(frame[:end]) + rest)
        connection.sock.shutdown(socket.SHUT_WR)
        while connection.sock.recv(4096):
            pass
    except OSError as error:
        assert not isinstance(error, TimeoutError)
    connection.close()
    attacked.works(10**15 + incarnation)


def test_what_is_left_of_a_worker_that_is_given_up(served: Served):
    """Whole updates that are still to be made; neither others nor parts."""
    connection = served.reach()
    for update, chunks in ((4, SHARD.chunks), (5, SHARD.chunks), (6, SHARD.chunks[:1])):
        for number, chunk in enumerate(chunks):
            connection.send(
                Header(Kind.PUSH, chunk.num_bytes, chunk.dtype, 0, 77, update, number),
                bytes(chunk.num_bytes),
            )
    assert [served.completed.get(timeout=PATIENCE_S)[0] for _ in range(2)] == [4, 5]
    served.exchange.dismiss(0, 77, keeps=[4])
    assert served.loses()[0] == WORKER
    until(lambda: served.exchange.gatherings.keys() == {4})
    assert all(bool((g == 0).all()) for g in served.exchange.gradients(4)[0].values())
