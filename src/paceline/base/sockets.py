"""Sockets of processes that talk to each other across hosts."""

from __future__ import annotations

import socket


def listen() -> socket.socket:
    """Listen on a free port of all addresses of this host."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", 0), backlog=1024)


def read_into(sock: socket.socket, target: memoryview) -> None:
    """Fill the target with what comes next.

    Raises:
        ConnectionError: the peer closed the connection before.
        OSError: the connection broke, or its timeout is over.
    """
    while target:
        if not (count := sock.recv_into(target)):
            raise ConnectionError("the other side closed the connection")
        target = target[count:]


def read(sock: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes of what comes next; raises as `read_into`."""
    data = bytearray(num_bytes)
    read_into(sock, memoryview(data))
    return bytes(data)
