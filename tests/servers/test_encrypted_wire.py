"""Servers and workers whose connections go through somebody between them."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from conditions import PATIENCE_S, until

from paceline.launch.hosts.tls import Identity, TlsSocket
from paceline.servers.acceptor import Acceptor
from paceline.servers.wire import (
    Closed,
    Connection,
    Header,
    Kind,
    Peer,
    Role,
    WireError,
    connect,
    listen,
)

SECRET, LAYOUT, WORKER = b"s" * 32, b"l" * 32, Peer(Role.DATA, 0, 77)
TOLD = b"what nobody but the server may read"


Wrap = Callable[[socket.socket, bool], socket.socket | TlsSocket]


class Between:
    """Listens in a server's place, and passes on what comes. seen: all that went by."""

    def __init__(self, server: tuple[str, int], wrap: Wrap) -> None:
        """wrap: makes of each connection what is passed on from one to the other; True for the one from the worker."""
        self.server, self.wrap, self.seen = server, wrap, bytearray()
        self.sock = listen("127.0.0.1")
        self.address: tuple[str, int] = self.sock.getsockname()[:2]
        self.open: list[socket.socket] = [self.sock]
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        with suppress(OSError):
            while True:
                raw = self.sock.accept()[0], socket.create_connection(self.server)
                self.open += raw
                ends = [self.wrap(sock, number == 0) for number, sock in enumerate(raw)]
                for here, there in (ends, ends[::-1]):
                    threading.Thread(target=self._copy, args=(here, there), daemon=True).start()

    def _copy(self, here: socket.socket | TlsSocket, there: socket.socket | TlsSocket) -> None:
        buffer = memoryview(bytearray(1))  # TLS fills what it is given
        with suppress(OSError):
            while here.recv_into(buffer):
                self.seen += buffer
                there.sendmsg([buffer])
        with suppress(OSError):
            there.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for sock in self.open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class Encrypted:
    """A server that hears one message of each peer, and closes the connection."""

    def __init__(self, identity: Identity | None) -> None:
        self.heard: queue.Queue[bytes | WireError] = queue.Queue()
        self.welcomed: list[Peer] = []
        self.data = bytearray()
        self.encrypts = identity is not None
        self.door = Acceptor(
            listen("127.0.0.1"), self._hear, secret=SECRET, layout=LAYOUT, identity=identity
        )

    def _hear(self, connection: Connection, peer: Peer) -> None:
        self.welcomed.append(peer)
        try:
            header = connection.receive()
            self.data = bytearray(header.length)
            connection.read_into(memoryview(self.data))
            self.heard.put(bytes(self.data))
        except WireError as error:
            self.heard.put(error)
        finally:
            connection.close()

    def close(self) -> None:
        self.door.close()


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity.make()


@pytest.fixture
def start(identity: Identity) -> Iterator[Callable[[bool], Encrypted]]:
    started: list[Encrypted] = []

    def make(encrypts: bool) -> Encrypted:
        started.append(Encrypted(identity if encrypts else None))
        return started[-1]

    yield make
    for each in started:
        each.close()


@pytest.fixture
def between() -> Iterator[Callable[..., Between]]:
    made: list[Between] = []

    def make(server: Encrypted, wrap: Wrap = lambda sock, is_worker: sock) -> Between:
        made.append(Between(server.door.address, wrap))
        return made[-1]

    yield make
    for each in made:
        each.cut()


def _reach(address: tuple[str, int], *, encrypts: bool, secret: bytes = SECRET) -> Connection:
    return connect(
        address, WORKER, secret=secret, layout=LAYOUT, timeout_s=PATIENCE_S, encrypts=encrypts
    )


@pytest.mark.parametrize("encrypts", [False, True])
def test_who_reads_the_network_reads_what_is_said_without_tls_alone(
    start: Callable[[bool], Encrypted], between: Any, encrypts: bool
):
    server = start(encrypts)
    reader = between(server)
    connection = _reach(reader.address, encrypts=encrypts)
    connection.send(Header(Kind.PUSH, len(TOLD)), TOLD)
    assert server.heard.get(timeout=PATIENCE_S) == TOLD
    connection.close()
    assert (TOLD in reader.seen, b"PLps" in reader.seen, LAYOUT in reader.seen) == (
        not encrypts,
    ) * 3


def test_who_ends_tls_between_them_is_refused(start: Callable[[bool], Encrypted], between: Any):
    """He passes on all that both say, and what they sign names his certificate to one and the server's to the other."""
    server, his = start(True), Identity.make()

    def ends(sock: socket.socket, is_worker: bool) -> TlsSocket:
        sock.settimeout(PATIENCE_S)
        wrapped = TlsSocket(sock, his if is_worker else None)
        wrapped.handshake()
        return wrapped

    relay = between(server, ends)
    with pytest.raises(
        WireError, match=r"does not know the run's secret(.|\n)*nothing between them may end TLS"
    ):
        _reach(relay.address, encrypts=True)
    assert b"PLps" in relay.seen  # so he did read what they said
    until(lambda: server.door.refused == 1)
    assert not server.welcomed


def test_a_server_that_passes_for_another_is_refused():
    """Whatever it answers: the worker hears that the proof is none."""
    his = Identity.make()
    with listen("127.0.0.1") as sock:

        def impostor() -> None:
            connection = Connection(sock.accept()[0])
            connection.encrypt(his)
            connection.send(Header(Kind.CHALLENGE, 32), b"c" * 32)
            for _ in range(2):
                connection.read_into(memoryview(bytearray(connection.receive().length)))
            connection.send(Header(Kind.WELCOME, 32), b"w" * 32)
            connection.close()

        threading.Thread(target=impostor, daemon=True).start()
        with pytest.raises(WireError, match="does not know the run's secret"):
            _reach(sock.getsockname()[:2], encrypts=True)


def test_another_secret(start: Callable[[bool], Encrypted]):
    server = start(True)
    with pytest.raises(WireError, match="refused this rank: a peer does not know the run's secret"):
        _reach(server.door.address, encrypts=True, secret=b"x" * 32)


@pytest.mark.parametrize(
    ("encrypts", "why"),
    [
        (False, "refused this rank: it does not encrypt, and the server does"),
        (True, "does not encrypt, and this rank does"),
    ],
)
def test_one_side_encrypts_and_the_other_does_not(
    start: Callable[[bool], Encrypted], encrypts: bool, why: str
):
    """The worker says so, and it is no failure of which somebody else says more."""
    server = start(not encrypts)
    with pytest.raises(
        WireError, match=rf"{why} \(PACELINE_TLS=1\)(.|\n)*must be equal on all hosts"
    ) as raised:
        _reach(server.door.address, encrypts=encrypts)
    assert not raised.value.heard
    _reach(server.door.address, encrypts=not encrypts).close()  # the next one is served


def test_strangers_that_stop_in_the_handshake_keep_no_worker_out(
    start: Callable[[bool], Encrypted],
):
    """They say nothing, or half of how TLS begins: they take each other's places."""
    server, hello = start(True), _client_hello()
    strangers = [socket.create_connection(server.door.address) for _ in range(150)]
    for number, sock in enumerate(strangers):
        with suppress(OSError):
            sock.sendall(hello[: number % len(hello)])
    connection = _reach(server.door.address, encrypts=True)
    assert len(server.door.unproven) <= 64
    for sock in strangers:
        sock.close()
    connection.close()


def _client_hello() -> bytes:
    context, incoming, outgoing = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        ssl.MemoryBIO(),
        ssl.MemoryBIO(),
    )
    context.check_hostname = False
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def test_a_stream_that_is_cut_is_a_peer_that_is_gone(
    start: Callable[[bool], Encrypted], between: Any
):
    """Who is between them can end it and no more: what came is not taken for a whole frame."""
    server = start(True)
    relay = between(server)
    connection = _reach(relay.address, encrypts=True)
    connection.send(Header(Kind.PUSH, 100))
    connection.sock.sendmsg([memoryview(b"x" * 40)])
    until(lambda: server.data.count(b"x") == 40)
    relay.cut()
    lost = server.heard.get(timeout=PATIENCE_S)
    assert isinstance(lost, Closed) and "40 of 100 bytes" in str(lost)
    with pytest.raises(Closed):
        connection.receive()
    connection.close()
