"""Connections whose peers have yet to prove themselves: only so many at a time, and strangers can't keep peers out."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from contextlib import suppress

PLACES = 64  # a peer needs its place for a round trip


class PendingPeers:
    """Has a place for each connection until its peer has proved itself.

    A new connection always gets a place. If all are taken, the oldest connection of the address with the most of them
    loses its own: peers prove themselves in milliseconds, and who opens connections and says nothing loses them first.
    """

    def __init__(self, places: int = PLACES) -> None:
        self.places = places
        self._addresses: dict[socket.socket, str] = {}  # the oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, sock: socket.socket) -> socket.socket | None:
        """Give a connection a place. Returns the one that lost its own: it is shut down and yet to be closed."""
        try:
            address = str(sock.getpeername()[0])
        except OSError:
            address = ""  # it is gone already
        with self._lock:
            self._addresses[sock] = address
            if len(self._addresses) <= self.places:
                return None
            crowded, _ = Counter(self._addresses.values()).most_common(1)[0]
            loser = next(each for each, its in self._addresses.items() if its == crowded)
            del self._addresses[loser]
        with suppress(OSError):
            loser.shutdown(socket.SHUT_RDWR)
        return loser

    def remove(self, sock: socket.socket) -> bool:
        """The peer has proved itself, or is gone. Returns whether the connection still had its place."""
        with self._lock:
            return self._addresses.pop(sock, None) is not None
