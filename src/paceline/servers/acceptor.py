"""Lets peers in that prove themselves, and hears what they say."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from paceline.launch.hosts.pending_peers import PendingPeers
from paceline.servers.wire import Connection, Peer, Role, WireError, accept

_REST_S = 0.05  # when the system has no connection to give


class Acceptor:
    """Listens for peers, lets each prove itself on a thread of its own, and hands those that did to `welcome`.

    A stranger costs a thread for some seconds and nothing else; `refused` counts them.

    Args:
        check: Raises a WireError for a peer that knows the secret and has no business here; it is told why.
    """

    def __init__(
        self,
        sock: socket.socket,
        welcome: Callable[[Connection, Peer], None],
        *,
        secret: bytes,
        layout: bytes,
        check: Callable[[Peer], None] = lambda peer: None,
    ) -> None:
        self.sock, self.welcome = sock, welcome
        self.accept = partial(accept, secret=secret, layout=layout, check=check)
        self.refused = 0
        self.is_closed = False
        self.unproven = PendingPeers()
        threading.Thread(target=self._listen, name="paceline-door", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.sock.getsockname()[:2]
        return host, port

    def close(self) -> None:
        self.is_closed = True
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self.sock.accept()
            except OSError:
                if self.is_closed:
                    return
                time.sleep(_REST_S)  # too many files are open, or whoever came is gone
                continue
            self.unproven.add(sock)  # the thread of one that loses its place finds it shut down
            threading.Thread(
                target=self._admit, args=(sock,), name="paceline-admit", daemon=True
            ).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            connection, peer = self.accept(sock)
        except Exception:  # of whatever kind: nobody has proved yet that they may end anything here
            sock.close()
            self.refused += 1
            return
        finally:
            self.unproven.remove(sock)
        self.welcome(connection, peer)


def listen_to(
    connection: Connection,
    peer: Peer,
    tell: Callable[[Peer, dict[str, Any] | WireError], None],
) -> None:
    """Hear a peer's messages on a thread of their own, and at last why there are no more."""

    def work() -> None:
        try:
            while True:
                tell(peer, connection.receive_message())
        except WireError as error:
            tell(peer, error)  # before the peer learns of it
            connection.close()

    threading.Thread(
        target=work, name=f"paceline-{Role(peer.role).name.lower()}-{peer.number}", daemon=True
    ).start()
