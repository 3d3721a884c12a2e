"""Sockets of processes that talk to each other across hosts."""

from __future__ import annotations

import os
import socket
import weakref

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_fork() -> None:
    for sock in list(_open):
        sock.close()


os.register_at_fork(after_in_child=_close_in_fork)


def closed_in_forks(sock: socket.socket) -> socket.socket:
    """Close a socket in forks of this process, which may outlive it, as a loader's workers may.

    Only then does the other side notice at once that this process is gone. Returns the socket.
    """
    _open.add(sock)
    return sock


def listen(host: str) -> socket.socket:
    """Listen on one address of this host, at a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=1024)


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
