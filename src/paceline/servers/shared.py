"""Memory that a worker and a server of one host share: messages are copied once, straight into their place.

The worker makes the memory and offers it in its first message. A server that can't reach it (another host, a container,
a system without memfd) declines, and elements travel in frames. A frame of shared memory carries only its head.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress

from paceline.servers.wire import Connection, Header, Kind, WireError

if sys.platform == "linux":
    import fcntl

_LINE_BYTES = 64
_MARK_BYTES = 32
_OFFER = struct.Struct(">QI32s")  # process, descriptor, mark at the memory's start


class Shared:
    """A place for each chunk's weights, which the server fills when asked, and for each chunk's gradient.

    weights, gradients: bytes of each chunk as they are on the wire.
    """

    def __init__(self, memory: mmap.mmap, chunk_bytes: Sequence[int]) -> None:
        self.memory, view = memory, memoryview(memory)
        self.is_full = view[
            _MARK_BYTES : _MARK_BYTES + len(chunk_bytes)
        ]  # 1: a gradient that was not yet taken
        places = [
            view[start : start + size]
            for start, size in zip(
                _starts(chunk_bytes), (*chunk_bytes, *chunk_bytes, 0), strict=True
            )
        ]
        self.weights, self.gradients = places[: len(chunk_bytes)], places[len(chunk_bytes) : -1]

    def put(self, chunk: int, parts: Sequence[memoryview]) -> bool:
        """A gradient for the server to take; False if it has not yet taken the last one."""
        if self.is_full[chunk]:
            return False
        place, offset = self.gradients[chunk], 0
        for part in parts:
            place[offset : offset + len(part)] = part
            offset += len(part)
        self.is_full[chunk] = 1
        return True

    def take(self, chunk: int, into: memoryview) -> None:
        """
        Raises:
            WireError: there is none.
        """
        if not self.is_full[chunk]:
            raise WireError(f"a worker says that chunk {chunk} is in shared memory, and it is not")
        into[:] = self.gradients[chunk]
        self.is_full[chunk] = 0


def offer(connection: Connection, chunk_bytes: Sequence[int]) -> Shared | None:
    """Make memory and offer it to a server on the same host; None if it can't have it."""
    if sys.platform != "linux" or not connection.is_within_host:
        return None
    descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        size = _size(chunk_bytes)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(descriptor, size)
        mark = secrets.token_bytes(_MARK_BYTES)
        memory[:_MARK_BYTES] = mark
        data = _OFFER.pack(os.getpid(), descriptor, mark)
        connection.send(Header(Kind.OFFER, len(data)), data)
        answer = connection.receive()
        if answer.kind not in (Kind.TAKEN, Kind.DECLINED):
            raise WireError(f"a server answered an offer of memory with {answer.kind.name}")
        connection.checked(answer, 0, 0)
        return Shared(memory, chunk_bytes) if answer.kind == Kind.TAKEN else None
    finally:
        os.close(descriptor)


def accept_offer(
    connection: Connection, header: Header, chunk_bytes: Sequence[int]
) -> Shared | None:
    """Take the memory that a worker offers, or decline."""
    data = bytearray(connection.checked(header, _OFFER.size, _OFFER.size))
    connection.read_into(memoryview(data))
    process, descriptor, mark = _OFFER.unpack(data)
    shared = None
    if sys.platform == "linux":
        with suppress(OSError):
            shared = _reach(process, descriptor, mark, chunk_bytes)
    connection.send(Header(Kind.DECLINED if shared is None else Kind.TAKEN))
    return shared


def _reach(process: int, descriptor: int, mark: bytes, chunk_bytes: Sequence[int]) -> Shared | None:
    file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # What could be cut short under us would end this process when it is touched.
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK and os.fstat(
            file
        ).st_size == _size(chunk_bytes):
            memory = mmap.mmap(file, 0)
            if memory[:_MARK_BYTES] == mark:
                return Shared(memory, chunk_bytes)
        return None
    finally:
        os.close(file)


def _starts(chunk_bytes: Sequence[int]) -> list[int]:
    """Where each chunk's weights begin, then each gradient, then the end; on lines of their own."""
    sizes = (
        -(-size // _LINE_BYTES) * _LINE_BYTES
        for size in (_MARK_BYTES + len(chunk_bytes), *chunk_bytes, *chunk_bytes)
    )
    return list(itertools.accumulate(sizes))


def _size(chunk_bytes: Sequence[int]) -> int:
    return _starts(chunk_bytes)[-1]
