"""Copies of ranks' state that hosts read from each other's memory.

Each host's process serves what is in its memory. A peer proves that it knows the host's key, and so does the host;
then the peer asks for parts of copies, in requests and answers of fixed forms. Nothing is written at a peer's word but
the two numbers that say what the peer has taken over.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from paceline.launch.hosts.pending_peers import PendingPeers
from paceline.launch.hosts.run_keys import run_key
from paceline.launch.process.memory_store import PIECE_BYTES, DoubleBuffer

_NONCE_BYTES, _PROOF_BYTES = 16, 32
_HANDSHAKE_S = 10.0
_REQUEST = struct.Struct(">Bqqqq")  # what is asked, slot, step, offset, count
_NUMBERS = struct.Struct(">qq")
_OFFER, _EXTENT, _READ, _TAKEN = range(4)
_NONE = -1


class Offers(Protocol):
    """What a host offers to the one that keeps copies for it."""

    def offered(self) -> int | None:
        """The step of the copies that another host may take over; None if there are none."""

    def taken(self, step: int, took_us: int) -> None:
        """The other host has them, and needs so long for such copies; 0 if that is not known yet."""


@dataclass(frozen=True, slots=True)
class CopyAddress:
    """Where a host serves its copies, and the nonce of the key that a peer proves to know; nothing of it is secret."""

    host: str
    port: int
    nonce: str

    @property
    def key(self) -> bytes:
        return run_key("copies", self.nonce)


class CopyServer:
    """Serves the slots of this host until it is closed, a thread a peer."""

    def __init__(self, slots: DoubleBuffer, offers: Offers, key: bytes) -> None:
        self._slots, self._offers, self._key = slots, offers, key
        self._listener = (
            socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
            if socket.has_dualstack_ipv6()
            else socket.create_server(("", 0), backlog=1024)
        )
        self.port: int = self._listener.getsockname()[1]
        self._unproven = PendingPeers()
        _started(self._accept)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            self._unproven.add(
                sock
            )  # who loses a place for it is shut down, and its thread closes it
            _started(partial(self._serve, sock))

    def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(OSError):
            try:
                sock.settimeout(_HANDSHAKE_S)
                is_peer = self._proves(sock)
            finally:
                has_place = self._unproven.remove(sock)
            if is_peer and has_place:
                sock.settimeout(None)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                while self._answer(sock, *_REQUEST.unpack(_exactly(sock, _REQUEST.size))):
                    pass

    def _proves(self, sock: socket.socket) -> bool:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(nonce)
        peer_nonce = _exactly(sock, _NONCE_BYTES)
        if not hmac.compare_digest(
            _exactly(sock, _PROOF_BYTES), _proof(self._key, b"peer", nonce, peer_nonce)
        ):
            return False
        sock.sendall(_proof(self._key, b"host", nonce, peer_nonce))
        return True

    def _answer(
        self, sock: socket.socket, request: int, slot: int, step: int, offset: int, count: int
    ) -> bool:
        """Returns whether the peer may ask again."""
        if request == _OFFER:
            offered = self._offers.offered()
            sock.sendall(_NUMBERS.pack(_NONE if offered is None else offered, 0))
        elif request == _TAKEN:
            self._offers.taken(step, count)
        elif request == _EXTENT:
            sock.sendall(_NUMBERS.pack(*(self._extent(slot, step) or (_NONE, _NONE))))
        elif request == _READ and 0 <= count <= PIECE_BYTES:
            sock.sendall(self._part(slot, step, offset, count))
        else:
            return False
        return True

    def _extent(self, slot: int, step: int) -> tuple[int, int] | None:
        is_there = 0 <= slot < self._slots.num_ranks and step in self._slots.steps(slot)
        return self._slots.extent(slot, step) if is_there else None

    def _part(self, slot: int, step: int, offset: int, count: int) -> bytes:
        """A part of a copy and after it whether that is still the copy of the step."""
        extent, data = self._extent(slot, step), bytearray(count + 1)
        if extent is not None and 0 <= offset <= extent[1] - count:
            self._slots.read_into(slot, step, offset, memoryview(data)[:count])
            data[count] = self._extent(slot, step) == extent
        return bytes(data)


class CopyReader:
    """A connection to a host's copies.

    Raises:
        OSError: from each method, the host can't be reached or does not have what it should.
    """

    def __init__(self, address: CopyAddress, *, timeout_s: float) -> None:
        self._sock = socket.create_connection((address.host, address.port), timeout=timeout_s)
        self._lock = threading.Lock()
        try:
            key, nonce = address.key, secrets.token_bytes(_NONCE_BYTES)
            host_nonce = _exactly(self._sock, _NONCE_BYTES)
            self._sock.sendall(nonce + _proof(key, b"peer", host_nonce, nonce))
            if not hmac.compare_digest(
                _exactly(self._sock, _PROOF_BYTES), _proof(key, b"host", host_nonce, nonce)
            ):
                raise ConnectionError(
                    f"what answers at {address.host}:{address.port} is no host of this run"
                )
        except BaseException:
            self._sock.close()
            raise

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def offered(self) -> int | None:
        """See `Offers`."""
        step = self._numbers(_OFFER)[0]
        return None if step == _NONE else step

    def tell_taken(self, step: int, took_us: int) -> None:
        """This side has the copies of a step."""
        self._sock.sendall(_REQUEST.pack(_TAKEN, 0, step, 0, took_us))

    def extent(self, slot: int, step: int) -> tuple[int, int]:
        """See `DoubleBuffer.extent`."""
        start, end = self._numbers(_EXTENT, slot, step)
        if not 0 <= start <= end:
            raise ConnectionError(f"the host has no copy of step {step}")
        return start, end

    def read_into(self, slot: int, step: int, offset: int, target: memoryview) -> None:
        """Fill the target from a place in a copy on, in bounded pieces."""
        for start in range(0, len(target), PIECE_BYTES):
            piece, is_whole = target[start : start + PIECE_BYTES], bytearray(1)
            with self._lock:
                self._sock.sendall(_REQUEST.pack(_READ, slot, step, offset + start, len(piece)))
                _fill(self._sock, piece)
                _fill(self._sock, memoryview(is_whole))
            if not is_whole[0]:
                raise ConnectionError(f"the host has the copy of step {step} no more")

    def _numbers(self, request: int, slot: int = 0, step: int = 0) -> tuple[int, int]:
        with self._lock:
            self._sock.sendall(_REQUEST.pack(request, slot, step, 0, 0))
            first, second = _NUMBERS.unpack(_exactly(self._sock, _NUMBERS.size))
        return first, second


def _proof(key: bytes, side: bytes, of_host: bytes, of_peer: bytes) -> bytes:
    return hmac.new(key, b"copies " + side + of_host + of_peer, hashlib.sha256).digest()


def _started(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="paceline-copies", daemon=True).start()


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(sock, memoryview(data))
    return bytes(data)


def _fill(sock: socket.socket, target: memoryview) -> None:
    while target:
        if not (count := sock.recv_into(target)):
            raise ConnectionError("the connection to the host's copies was closed")
        target = target[count:]
