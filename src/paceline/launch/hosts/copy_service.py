"""Copies of ranks' state that hosts read from each other's memory.

Each host's process serves what is in its memory. A peer that has proved itself asks for parts of copies, in requests
and answers of fixed forms. Nothing is written at a peer's word but the two numbers that say what the peer has taken
over.
"""

from __future__ import annotations

import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from paceline.base import sockets
from paceline.base.errors import PeerLost
from paceline.base.long_work import long_work
from paceline.base.secure import Acceptor, Proven, connect
from paceline.launch.hosts.run_keys import run_key
from paceline.launch.process.memory_store import NOTHING, PIECE_BYTES, StateCopies

_INDEX_BYTES = 2**28  # of an index, at most
_REQUEST = struct.Struct(">Bqqqq")  # what is asked, slot, step, offset, count
_NUMBERS = struct.Struct(">qq")
_OFFER, _EXTENT, _READ, _TAKEN = range(4)


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
    """Serves the slots of this host until it is closed, a thread a peer.

    host: the address at which it listens; "" for all of them.
    offered: gives the step of the copies that another host may take over; NOTHING if there are none. taken: is told
    that the other host has those of a step, and how many microseconds it needs for such copies; 0 if that is not known
    yet.
    """

    def __init__(
        self,
        slots: StateCopies,
        key: bytes,
        *,
        host: str,
        offered: Callable[[], int],
        taken: Callable[[int, int], None],
    ) -> None:
        self._slots, self._offered, self._taken = slots, offered, taken
        self._acceptor = Acceptor(sockets.listen(host), self._serve, secret=key)
        self.port, self.close = self._acceptor.address[1], self._acceptor.close

    def _serve(self, proven: Proven) -> None:
        with proven.sock as sock, suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            while (
                answer := self._answer(*_REQUEST.unpack(sockets.read(sock, _REQUEST.size)))
            ) is not None:
                sock.sendall(answer)

    def _answer(
        self, request: int, slot: int, step: int, offset: int, count: int
    ) -> bytes | bytearray | None:
        """Return what the peer gets; None if it may ask no more."""
        if request == _OFFER:
            return _NUMBERS.pack(self._offered(), 0)
        if request == _TAKEN:
            self._taken(step, count)
            return b""
        start, end = self._extent(slot, step)
        if request == _EXTENT:
            return _NUMBERS.pack(start, end)
        if request != _READ or not 0 <= count <= PIECE_BYTES:
            return None
        # A part of a copy, and after it whether that is still the copy of the step.
        data = bytearray(count + 1)
        if 0 <= offset <= end - count:
            with suppress(KeyError, EOFError):  # a rank writes over it
                self._slots.read_into(slot, step, offset, memoryview(data)[:count])
            data[count] = self._extent(slot, step) == (start, end)
        return data

    def _extent(self, slot: int, step: int) -> tuple[int, int]:
        if 0 <= slot < self._slots.num_ranks:
            with suppress(KeyError):
                return self._slots.extent(slot, step)
        return NOTHING, NOTHING


class CopyReader:
    """A connection to a host's copies. rank: the first one of that host, if it is known.

    Raises:
        PeerLost: from each method, the host can't be reached or does not have what it should.
    """

    def __init__(self, address: CopyAddress, *, timeout_s: float, rank: int | None = None) -> None:
        self._address, self._rank, self._lock = address, rank, threading.Lock()
        with self._told():
            self._sock = connect((address.host, address.port), address.key, timeout_s=timeout_s)
            self._sock.settimeout(timeout_s)
            weakref.finalize(self, self._sock.close)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PeerLost(
                f"its host {self._address.host} does not give the copies that it has: {error}",
                heard=True,  # who sees why it is gone says more
                rank=self._rank,
            ) from error

    def close(self) -> None:
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def offered(self) -> int:
        """See `CopyServer`."""
        return self._numbers(_OFFER)[0]

    def tell_taken(self, step: int, took_us: int) -> None:
        """This side has the copies of a step."""
        with self._told():
            self._sock.sendall(_REQUEST.pack(_TAKEN, 0, step, 0, took_us))

    def extent(self, slot: int, step: int) -> tuple[int, int]:
        """See `StateCopies.extent`."""
        start, end = self._numbers(_EXTENT, slot, step)
        with self._told():
            if not 0 <= start <= end <= start + _INDEX_BYTES:
                raise ConnectionError(f"the host has no copy of step {step}")
        return start, end

    def read_into(self, slot: int, step: int, offset: int, target: memoryview) -> None:
        """Fill the target from a place in a copy on, in bounded pieces."""
        for start in range(0, len(target), PIECE_BYTES):
            piece, is_whole = target[start : start + PIECE_BYTES], bytearray(1)
            with self._lock, self._told():
                self._sock.sendall(_REQUEST.pack(_READ, slot, step, offset + start, len(piece)))
                sockets.read_into(self._sock, piece)
                sockets.read_into(self._sock, memoryview(is_whole))
                if not is_whole[0]:
                    raise ConnectionError(f"the host has the copy of step {step} no more")
            long_work.advanced()

    def _numbers(self, request: int, slot: int = 0, step: int = 0) -> tuple[int, int]:
        with self._lock, self._told():
            self._sock.sendall(_REQUEST.pack(request, slot, step, 0, 0))
            first, second = _NUMBERS.unpack(sockets.read(self._sock, _NUMBERS.size))
        return first, second


HostMemory = StateCopies | CopyReader  # of this host, or of another one


def index_of(memory: HostMemory, slot: int, step: int) -> bytes:
    """Return the index of a copy, as its rank wrote it."""
    start, end = memory.extent(slot, step)
    index = bytearray(end - start)
    memory.read_into(slot, step, start, memoryview(index))
    return bytes(index)
