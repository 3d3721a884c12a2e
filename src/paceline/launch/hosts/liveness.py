"""Connections by which ranks of a launcher learn that another rank died.

Each rank keeps a connection to rank 0, which passes on what it sees. The kernel closes the connections of a process
that dies, even if its peers wait in a collective of NCCL, which does not notice. A host that vanishes closes none;
TCP's keepalive probes find it after a minute.

What is said are numbers of ranks. They are signed by the run's secret and not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from paceline.base.secure import HANDSHAKE_S, Acceptor, Proven, connect
from paceline.base.sockets import closed_in_forks, listen

_PROOF_BYTES, _NUMBER = 32, struct.Struct(">i")
_FAREWELL = -1  # in either direction: this process is about to end, and all is well
MOST_SILENCE_S = 60.0  # of a host's kernel, which answers whatever its processes do


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
    """

    def __init__(self, proven: Proven, *, is_hub: bool) -> None:
        self.sock, self._key = proven.sock, proven.key
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
        host: The address of this host at which ranks find it.
        secret: Peers prove with it that they belong to the run.
        patience_s: See `silence_s`.
    """

    def __init__(self, host: str, *, secret: bytes, patience_s: float = MOST_SILENCE_S) -> None:
        self.lost: list[int] = []
        self.unreachable: list[int] = []
        self._silence_s = silence_s(patience_s)
        self._wake, self._woken = map(closed_in_forks, socket.socketpair())
        self._joined: deque[Proven] = deque()  # a byte tells of each
        self._members: dict[int, _Link] = {}
        self._farewell = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._acceptor = Acceptor(listen(host), self._join, secret=secret, claim_bytes=_NUMBER.size)
        self.port = self._acceptor.address[1]
        self._thread = _started_thread(self._serve)

    def close(self, *, farewell: bool) -> None:
        self._farewell = farewell
        self._acceptor.close()
        self._wake.close()
        self._thread.join()

    def _join(self, proven: Proven) -> None:
        """Have the hub's own thread take a rank."""
        self._joined.append(proven)
        with suppress(OSError):
            self._wake.send(b".")

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    key.data()
                elif self._woken.recv(1):
                    self._welcome(self._joined.popleft())
                else:
                    self._end()
                    return

    def _end(self) -> None:
        for member in self._members.values():
            if self._farewell:
                member.say(_FAREWELL)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _welcome(self, proven: Proven) -> None:
        (number,) = _NUMBER.unpack(proven.claim)
        proven.sock.setblocking(False)
        _watch_host(proven.sock, self._silence_s)
        self._members[number] = link = _Link(proven, is_hub=True)
        self._selector.register(proven.sock, selectors.EVENT_READ, lambda: self._hear(number, link))
        for word in self.lost:
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
        self._selector.unregister(link.sock)
        link.sock.close()
        if word != _FAREWELL:
            if is_unreachable:
                self.unreachable.append(number)
            self.lost.append(number)
            for member in self._members.values():
                member.say(number)


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
        proven = connect(address, secret, claim=_NUMBER.pack(rank), timeout_s=HANDSHAKE_S)
        self._sock, self._link = proven.sock, _Link(proven, is_hub=False)
        _watch_host(self._sock, silence_s(patience_s))
        self._thread = _started_thread(self._listen)

    def close(self, *, farewell: bool) -> None:
        if farewell:
            self._link.say(_FAREWELL)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()

    def _listen(self) -> None:
        try:
            while (word := self._link.next()) != _FAREWELL:
                self.lost.append(word)
        except OSError as error:
            if _is_silence(error):
                self.unreachable.append(0)
            self.lost.append(0)


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
