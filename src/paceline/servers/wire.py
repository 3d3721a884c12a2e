"""Messages between workers and servers: framed, checked, with a version, over TCP between peers that know a secret.

Both sides have proved themselves (`base/secure.py`) before the first frame. Frames are not encrypted, and the network
is trusted not to change them.

A frame is a header of fixed size and a payload, whose length is checked against what may come before anything is
allocated for it. Payloads are JSON or the bare elements of tensors; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from paceline.base import secure
from paceline.base.errors import PeerLost
from paceline.base.waiting import waiting

MAGIC = b"PLps"
VERSION = 2
# magic, version, kind, dtype, worker, incarnation, step, chunk, length of the payload; big-endian
_HEADER = struct.Struct(">4sHBBIIqIQ")
DTYPES = ("none", "float32", "float64", "bfloat16", "float16", "complex64", "complex128")
DOCUMENT_BYTES = 16 * 2**20  # most of a JSON payload
# What the system takes of a connection ahead of the network: nothing urgent can pass it any more. With a round trip of
# 0.1 ms it lets a connection carry 1 GB/s. With 10 ms it would be 10 MB/s, but links that long are for local=H.
_BUFFER_BYTES = 64 * 2**10
INTERACTIVE, BULK = (
    6,
    2,
)  # what goes first and last of a host's queue, as Linux's own scheduler of packets sorts it
_CLAIM = struct.Struct(
    ">HHI32s"
)  # a peer's role, number and incarnation, and how it cuts the model
CLAIM_BYTES = _CLAIM.size


class Kind(IntEnum):
    """What a frame is. PUSH_REST: a chunk of a gradient that backward did not complete, with zeros for what it left."""

    WELCOME = 3
    REFUSED = 4
    MESSAGE = 5
    PUSH = 6
    PULL = 7
    WEIGHTS = 8
    PUSH_REST = 9
    PULL_ROWS = 10
    ROWS = 11
    PUSH_ROWS = 12
    OFFER = 13
    TAKEN = 14
    DECLINED = 15


class Role(IntEnum):
    """What a peer wants of a connection."""

    CONTROL = 1
    DATA = 2
    SERVER = 3


_KINDS, _ROLES = frozenset(Kind), frozenset(Role)


class WireError(PeerLost):
    """A peer sent what it may not send, or is gone. heard: its own report, if there is one, is the cause."""

    heard = True

    @classmethod
    def of_this_rank(cls, message: str, *, hint: str | None = None) -> WireError:
        """One of which no other rank says more."""
        return cls(message, hint=hint, heard=False)


class Closed(WireError):
    """The peer closed the connection."""


@dataclass(frozen=True, slots=True)
class Header:
    """The head of a frame. step: an update's number, or a version of the weights."""

    kind: Kind
    length: int = 0
    dtype: str = "none"
    worker: int = 0
    incarnation: int = 0
    step: int = 0
    chunk: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.kind,
            DTYPES.index(self.dtype),
            self.worker,
            self.incarnation,
            self.step,
            self.chunk,
            self.length,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """
        Raises:
            WireError: these are no bytes of ours, or of another version.
        """
        magic, version, kind, dtype, worker, incarnation, step, chunk, length = _HEADER.unpack(data)
        if magic != MAGIC:
            raise WireError(
                f"a peer sent {magic!r} where a frame of a parameter server begins with {MAGIC!r}"
            )
        if version != VERSION:
            raise WireError(
                f"a peer speaks version {version} of the parameter servers' protocol and this is version "
                f"{VERSION}",
                hint="run the same Paceline on every host",
            )
        if kind not in _KINDS or dtype >= len(DTYPES):
            raise WireError(f"a peer sent a frame of unknown kind {kind} or dtype {dtype}")
        return cls(Kind(kind), length, DTYPES[dtype], worker, incarnation, step, chunk)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end. number: of the worker, or of the server."""

    role: Role
    number: int
    incarnation: int


Event = tuple[
    Peer, "dict[str, Any] | Exception"
]  # what a peer said, why it says no more, or what went wrong here


class Uplink:
    """What the connections of a process share: gradients go before weights.

    A gradient is waited for by all workers, or makes everybody's next weights fresher; of weights, those of the last
    layers are not needed for long. So while gradients are sent, one connection at a time sends weights.
    """

    def __init__(self) -> None:
        self.counting = threading.Lock()
        self.turn = threading.Lock()
        self.urgent = 0

    @contextmanager
    def first(self) -> Iterator[None]:
        """Send a gradient."""
        with self.counting:
            self.urgent += 1
        try:
            yield
        finally:
            with self.counting:
                self.urgent -= 1

    @contextmanager
    def after(self) -> Iterator[None]:
        """Choose and send weights."""
        if not self.urgent:
            yield
            return
        with self.turn:
            yield


class Connection:
    """A stream of frames. One thread at a time receives; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.is_within_host = sock.getpeername()[0] == sock.getsockname()[0]  # nothing queues there
        if not self.is_within_host:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self.sending = threading.Lock()
        self.deadline_s: float | None = None
        self.sent_bytes = self.received_bytes = 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, header: Header, *parts: memoryview | bytes) -> None:
        """One frame; `header.length` must be that of the parts.

        Raises:
            Closed: the peer is gone.
        """
        with self.sending:
            self._send(
                [
                    memoryview(header.pack()),
                    *(memoryview(part).cast("B") for part in parts if len(part)),
                ]
            )

    def _send(self, buffers: list[memoryview]) -> None:
        self.sent_bytes += sum(len(buffer) for buffer in buffers)
        try:
            while buffers:
                sent = self.sock.sendmsg(buffers[:256])  # of IOV_MAX, 1024
                while buffers and sent >= len(buffers[0]):
                    sent -= len(buffers.pop(0))
                if sent:
                    buffers[0] = buffers[0][sent:]
        except OSError as error:
            raise Closed(f"the connection broke while sending: {error}") from error

    def send_message(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self.send(Header(Kind.MESSAGE, len(data)), data)

    def receive(self) -> Header:
        """The head of the next frame; its payload must be read next.

        Raises:
            Closed: the peer is gone. WireError: it sent something else.
        """
        head = bytearray(_HEADER.size)
        self.read_into(memoryview(head))
        return Header.unpack(bytes(head))

    def read_into(self, buffer: memoryview) -> None:
        """Fill the buffer with what comes next."""
        view, got = buffer.cast("B"), 0
        while got < len(view):
            try:
                if self.deadline_s is not None:
                    self.sock.settimeout(max(1e-3, self.deadline_s - time.monotonic()))
                with waiting:
                    count = self.sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise Closed(
                    f"the connection broke after {got} of {len(view)} bytes: {error}"
                ) from error
            if count == 0:
                rest = f" after {got} of {len(view)} bytes" if got else ""
                raise Closed(f"the peer closed its connection{rest}")
            got += count
        self.received_bytes += len(view)

    def read_document(self, header: Header) -> Any:
        """A JSON payload; refused before it is read if it is too long."""
        data = bytearray(self.checked(header, 0, DOCUMENT_BYTES))
        self.read_into(memoryview(data))
        try:
            return json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise WireError(f"a peer sent a message that is no JSON: {error}") from error

    def receive_message(self) -> dict[str, Any]:
        """The next frame, which must be a message."""
        header = self.receive()
        if header.kind != Kind.MESSAGE:
            raise WireError(f"a peer sent {header.kind.name} where a message was due")
        document = self.read_document(header)
        if not isinstance(document, dict):
            raise WireError(f"a peer sent a message that is a {type(document).__name__}")
        return document

    def checked(self, header: Header, least: int, most: int) -> int:
        """The payload's length.

        Raises:
            WireError: it is out of these bounds.
        """
        if not least <= header.length <= most:
            allowed = str(most) if least == most else f"{least} to {most}"
            raise WireError(
                f"a peer sent {header.kind.name} of {header.length} bytes where {allowed} are allowed"
            )
        return header.length

    def limit(self, seconds: float | None) -> None:
        """What comes must be here in so many seconds from now, however it drips; None for no limit."""
        self.deadline_s = None if seconds is None else time.monotonic() + seconds
        self.sock.settimeout(seconds)

    def prioritise(self, priority: int) -> None:
        """Where what is sent queues in this host."""
        if hasattr(socket, "SO_PRIORITY"):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def connect(
    address: tuple[str, int], peer: Peer, *, secret: bytes, layout: bytes, timeout_s: float
) -> Connection:
    """Reach a server and prove to each other that both know the secret.

    layout: 32 bytes that both sides must share, of how the model is cut.

    Raises:
        WireError: it can't be reached, refuses this peer, or can't prove itself.
    """
    where = f"the server at {address[0]}:{address[1]}"
    claim = _CLAIM.pack(peer.role, peer.number, peer.incarnation, layout)
    try:
        sock = secure.connect(address, secret, claim=claim, timeout_s=timeout_s)
    except OSError as error:
        raise WireError(f"{where} can't be reached: {error}") from error
    connection = Connection(sock)
    try:
        connection.limit(secure.HANDSHAKE_S)
        header = connection.receive()
        if header.kind == Kind.REFUSED:
            why = bytearray(connection.checked(header, 0, 4096))
            connection.read_into(memoryview(why))
            raise WireError.of_this_rank(
                f"the server refused this rank: {why.decode(errors='replace')}"
            )
        if header.kind != Kind.WELCOME:
            raise WireError(f"a peer sent {header.kind.name} where a welcome was due")
        connection.limit(None)
        if peer.role != Role.DATA:
            connection.prioritise(INTERACTIVE)
    except BaseException:
        connection.close()
        raise
    return connection


def accept(
    proven: secure.Proven, *, layout: bytes, check: Callable[[Peer], None] = lambda peer: None
) -> tuple[Connection, Peer]:
    """Let in a peer that has proved itself.

    check: raises a WireError for a peer that has no business here.

    Raises:
        WireError: it has none; it was told why, and the connection is closed.
    """
    connection = Connection(proven.sock)
    try:
        peer = _peer(proven.claim, layout)
        check(peer)
        connection.send(Header(Kind.WELCOME))
        if peer.role != Role.DATA:
            connection.prioritise(INTERACTIVE)
    except WireError as error:
        with suppress(WireError):
            why = str(error).encode(errors="backslashreplace")
            connection.send(Header(Kind.REFUSED, len(why)), why)
        connection.close()
        raise
    return connection, peer


def _peer(claim: bytes, layout: bytes) -> Peer:
    """Who a peer says that it is.

    Raises:
        WireError: nobody of this run.
    """
    role, number, incarnation, its_layout = _CLAIM.unpack(claim)
    if its_layout != layout:
        raise WireError(
            "a peer cuts the model in another way: its job, plan or version differs",
            hint="start every rank with the same job file and plan",
        )
    if role not in _ROLES:
        raise WireError(f"a peer asks for a connection of unknown kind {role}")
    return Peer(Role(role), number, incarnation)
