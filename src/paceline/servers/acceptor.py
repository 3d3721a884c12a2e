"""Lets peers in that prove themselves, and hears what they say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from paceline.base.secure import Acceptor, Proven
from paceline.servers.wire import CLAIM_BYTES, Connection, Peer, Role, WireError, accept


def open_door(
    sock: socket.socket,
    welcome: Callable[[Connection, Peer], None],
    *,
    secret: bytes,
    layout: bytes,
    check: Callable[[Peer], None] = lambda peer: None,
) -> Acceptor:
    """Listen for peers, and hand each one that proved itself to `welcome`, on a thread of its own.

    check: raises a WireError for a peer that knows the secret and has no business here; it is told why.
    """

    def admit(proven: Proven) -> None:
        try:
            connection, peer = accept(proven, layout=layout, check=check)
        except WireError:
            return
        welcome(connection, peer)

    return Acceptor(sock, admit, secret=secret, claim_bytes=CLAIM_BYTES)


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
