"""Connections by which ranks of a launcher learn that another rank died.

Each rank keeps a connection to rank 0, which passes on what it sees. The kernel closes the connections of a process
that dies, even if its peers wait in a collective of NCCL, which does not notice. A host that vanishes closes none;
TCP's keepalive probes find it after a minute.

Who connects proves to know the run's secret. What is said later, numbers of ranks, is neither signed nor encrypted.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from paceline.base.secure import HANDSHAKE_S, Acceptor, Proven, connect
from paceline.base.sockets import closed_in_forks, listen, read

_NUMBER = struct.Struct(">i")
_FAREWELL = _NUMBER.pack(-1)  # in either direction: this process is about to end, and all is well
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
        self._members: dict[int, socket.socket] = {}
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
                _say(member, _FAREWELL)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _welcome(self, proven: Proven) -> None:
        (number,) = _NUMBER.unpack(proven.claim)
        proven.sock.setblocking(False)
        _watch_host(proven.sock, self._silence_s)
        self._members[number] = proven.sock
        self._selector.register(proven.sock, selectors.EVENT_READ, lambda: self._hear(number))
        for lost in self.lost:
            _say(proven.sock, _NUMBER.pack(lost))

    def _hear(self, number: int) -> None:
        """The only word of a member is its farewell; without one its end is a loss."""
        member, is_farewell = self._members.pop(number), False
        try:
            is_farewell = bool(member.recv(_NUMBER.size))
        except OSError as error:
            if _is_silence(error):
                self.unreachable.append(number)
        self._selector.unregister(member)
        member.close()
        if not is_farewell:
            self.lost.append(number)
            for other in self._members.values():
                _say(other, _NUMBER.pack(number))


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
        self._sock = connect(address, secret, claim=_NUMBER.pack(rank), timeout_s=HANDSHAKE_S)
        _watch_host(self._sock, silence_s(patience_s))
        self._thread = _started_thread(self._listen)

    def close(self, *, farewell: bool) -> None:
        if farewell:
            _say(self._sock, _FAREWELL)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()

    def _listen(self) -> None:
        try:
            while (word := read(self._sock, _NUMBER.size)) != _FAREWELL:
                self.lost += _NUMBER.unpack(word)
        except OSError as error:
            if _is_silence(error):
                self.unreachable.append(0)
            self.lost.append(0)


def _say(sock: socket.socket, word: bytes) -> None:
    """A peer that is gone, or takes nothing, needs not be told."""
    with suppress(OSError):
        sock.send(word)


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
