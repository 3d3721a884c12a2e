"""Connections by which ranks of a launcher learn that another rank died.

Each rank keeps a connection to rank 0, which passes on what it sees. The kernel closes the connections of a process
that dies, even if its peers wait in a collective of NCCL, which does not notice. A host that vanishes closes none;
TCP's keepalive probes find it after a minute.

What is said are numbers of ranks. They are signed by the run's secret and not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from paceline.base import sockets
from paceline.launch.hosts.pending_peers import PendingPeers

_NONCE_BYTES, _PROOF_BYTES, _NUMBER = 16, 32, struct.Struct(">i")
_CLAIM_BYTES = _NUMBER.size + _NONCE_BYTES  # a rank, and what its peer's proofs must be made for
_FAREWELL = -1  # in either direction: this process is about to end, and all is well
_WELCOME = -2  # the first word of rank 0, by which it proves that it is
_HANDSHAKE_S = 10.0
MOST_SILENCE_S = 60.0  # of a host's kernel, which answers whatever its processes do

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_fork() -> None:
    """A rank's forks, such as a loader's workers, may outlive it: they must not keep its connections open."""
    for sock in list(_open):
        sock.close()


os.register_at_fork(after_in_child=_close_in_fork)


def silence_s(patience_s: float) -> float:
    """How long a host may give no answer before it is given up."""
    return min(MOST_SILENCE_S, patience_s)


class Liveness(Protocol):
    """lost: ranks that ended without a farewell, as they are noticed; another thread adds to it. unreachable: those of
    them whose host gave no answer any more, as far as this rank has a connection to it."""

    lost: list[int]
    unreachable: list[int]

    def close(self, *, farewell: bool) -> None:
        """farewell: whether this rank ends as it should; else the others are told that it is lost."""


class _Link:
    """Numbers between two that have proved themselves. Each is signed with its place in its direction: whoever is
    between them can end the connection, and can't change, repeat or leave out what is said.

    key: of this connection alone.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, is_hub: bool) -> None:
        self.sock, self._key = sock, key
        self._sends_as, self._receives_from = (b"hub", b"spoke") if is_hub else (b"spoke", b"hub")
        self._num_sent = self._num_received = 0
        self._partial_word = b""

    def say(self, number: int) -> None:
        """A peer that is gone, or takes nothing, needs not be told."""
        data = _NUMBER.pack(number)
        with suppress(OSError):
            self.sock.send(data + self._proof(self._sends_as, self._num_sent, data))
        self._num_sent += 1

    def hear(self) -> int | None:
        """What has come; None if that is not a whole word.

        Raises:
            OSError: the connection has ended, or somebody else speaks.
        """
        data = self.sock.recv(_NUMBER.size + _PROOF_BYTES - len(self._partial_word))
        if not data:
            raise ConnectionError("the connection was closed")
        self._partial_word += data
        if len(self._partial_word) < _NUMBER.size + _PROOF_BYTES:
            return None
        word, proof, self._partial_word = (
            self._partial_word[: _NUMBER.size],
            self._partial_word[_NUMBER.size :],
            b"",
        )
        if not hmac.compare_digest(
            proof, self._proof(self._receives_from, self._num_received, word)
        ):
            raise ConnectionError("what came was not signed by the other rank")
        self._num_received += 1
        number: int = _NUMBER.unpack(word)[0]
        return number

    def next(self) -> int:
        """The next word; waits for it. Raises as `hear`."""
        while (word := self.hear()) is None:
            pass
        return word

    def _proof(self, side: bytes, place: int, word: bytes) -> bytes:
        return hmac.new(self._key, side + place.to_bytes(8, "big") + word, hashlib.sha256).digest()


class Hub:
    """Rank 0's end: hears of all ranks, and tells them.

    Args:
        secret: Peers prove with it that they belong to the run.
        patience_s: See `silence_s`.
    """

    def __init__(self, *, secret: bytes, patience_s: float = MOST_SILENCE_S) -> None:
        self.lost: list[int] = []
        self.unreachable: list[int] = []
        self._secret, self._silence_s = secret, silence_s(patience_s)
        self._listener = _registered(sockets.listen())
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = map(_registered, socket.socketpair())
        self._members: dict[int, _Link] = {}
        self._unproven = PendingPeers()
        self._farewell = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = _started_thread(self._serve)

    def close(self, *, farewell: bool) -> None:
        self._farewell = farewell
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._end()
                    return
                key.data()

    def _end(self) -> None:
        for member in self._members.values():
            if self._farewell:
                member.say(_FAREWELL)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self) -> None:
        with suppress(OSError):
            sock = _registered(self._listener.accept()[0])
            sock.setblocking(False)
            nonce, claim = secrets.token_bytes(_NONCE_BYTES), bytearray()
            sock.send(nonce)  # into an empty buffer
            if (loser := self._unproven.add(sock)) is not None:
                self._drop(loser)
            self._selector.register(
                sock, selectors.EVENT_READ, lambda: self._greet(sock, nonce, claim)
            )

    def _greet(self, sock: socket.socket, nonce: bytes, claim: bytearray) -> None:
        """Take what a peer says of itself, as far as it has come."""
        if sock.fileno() < 0:
            return  # it lost its place in this very round
        data = _received(sock, _CLAIM_BYTES + _PROOF_BYTES - len(claim))
        claim += data
        if data and len(claim) < _CLAIM_BYTES + _PROOF_BYTES:
            return
        self._unproven.remove(sock)
        statement = bytes(claim[:_CLAIM_BYTES])
        if not data or not hmac.compare_digest(
            bytes(claim[_CLAIM_BYTES:]), _keyed(self._secret, b"liveness", nonce, statement)
        ):
            self._drop(sock)
            return
        (number,) = _NUMBER.unpack(statement[: _NUMBER.size])
        _watch_host(sock, self._silence_s)
        self._members[number] = link = _Link(
            sock, _keyed(self._secret, b"words", nonce, statement), is_hub=True
        )
        self._selector.modify(sock, selectors.EVENT_READ, lambda: self._hear(number, link))
        for word in (_WELCOME, *self.lost):
            link.say(word)

    def _hear(self, number: int, link: _Link) -> None:
        """The only word of a member is its farewell; without one its end is a loss."""
        is_unreachable = False
        try:
            if (word := link.hear()) is None:
                return
        except OSError as error:
            word, is_unreachable = None, _is_silence(error)
        del self._members[number]
        self._drop(link.sock)
        if word != _FAREWELL:
            if is_unreachable:
                self.unreachable.append(number)
            self.lost.append(number)
            for member in self._members.values():
                member.say(number)

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()


class Spoke:
    """Another rank's end.

    Args:
        address: Of rank 0's host, and its hub's port.

    Raises:
        OSError: it can't be reached there, or does not know the secret.
    """

    def __init__(
        self,
        rank: int,
        address: tuple[str, int],
        *,
        secret: bytes,
        patience_s: float = MOST_SILENCE_S,
    ) -> None:
        self.lost: list[int] = []
        self.unreachable: list[int] = []
        self._sock = _registered(socket.create_connection(address, timeout=_HANDSHAKE_S))
        try:
            self._link = self._joined(rank, secret)
        except BaseException:
            self._sock.close()
            raise
        self._sock.settimeout(None)
        _watch_host(self._sock, silence_s(patience_s))
        self._thread = _started_thread(self._listen)

    def close(self, *, farewell: bool) -> None:
        if farewell:
            self._link.say(_FAREWELL)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()

    def _joined(self, rank: int, secret: bytes) -> _Link:
        nonce = sockets.read(self._sock, _NONCE_BYTES)
        statement = _NUMBER.pack(rank) + secrets.token_bytes(_NONCE_BYTES)
        self._sock.sendall(statement + _keyed(secret, b"liveness", nonce, statement))
        link = _Link(self._sock, _keyed(secret, b"words", nonce, statement), is_hub=False)
        if link.next() != _WELCOME:
            raise ConnectionError("rank 0 did not welcome this rank")
        return link

    def _listen(self) -> None:
        try:
            while (word := self._link.next()) != _FAREWELL:
                self.lost.append(word)
        except OSError as error:
            if _is_silence(error):
                self.unreachable.append(0)
            self.lost.append(0)


def _registered(sock: socket.socket) -> socket.socket:
    _open.add(sock)
    return sock


def _started_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, name="paceline-liveness", daemon=True)
    thread.start()
    return thread


def _watch_host(sock: socket.socket, silence_s: float) -> None:
    """Have the kernel end a connection whose other host gives no answer for so long, in whole seconds."""
    idle_s = max(1, round(silence_s / 2))
    interval_s = max(1, round(silence_s - idle_s) // 5)
    probes = {
        "TCP_KEEPIDLE": idle_s,
        "TCP_KEEPALIVE": idle_s,
        "TCP_KEEPINTVL": interval_s,
        "TCP_KEEPCNT": max(1, round(silence_s - idle_s) // interval_s),
    }
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in probes.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _is_silence(error: OSError) -> bool:
    """Whether a connection ended because the other host gave no answer, and not because a process closed it."""
    return not isinstance(error, ConnectionError)


def _received(sock: socket.socket, size: int) -> bytes:
    """What has come, up to a size; nothing from a peer that is gone."""
    try:
        return sock.recv(size)
    except OSError:
        return b""


def _keyed(secret: bytes, purpose: bytes, nonce: bytes, claim: bytes) -> bytes:
    """What nobody without the secret can make, for one connection and one purpose."""
    return hmac.new(secret, purpose + nonce + claim, hashlib.sha256).digest()
