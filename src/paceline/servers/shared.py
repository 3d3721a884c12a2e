"""Memory that a worker and a server of one host share: messages are copied once, straight into their place.

The worker makes the memory and offers it in its first message. A server that can't reach it (another host, a container)
declines, and elements travel in frames. A frame of shared memory carries only its head.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

from paceline.launch.collectives.memory import Address, SharedMemory, mapped, own_memory
from paceline.servers.wire import Connection, Header, Kind, WireError

_LINE_BYTES = 64
_OFFER = struct.Struct(
    ">QIQQ"
)  # the memory's address, and where this connection's part of it begins


class Shared:
    """A place for each chunk's weights, which the server fills when asked, and for each chunk's gradient.

    weights, gradients: bytes of each chunk as they are on the wire.
    """

    def __init__(self, memory: SharedMemory, start: int, chunk_bytes: Sequence[int]) -> None:
        self.memory, sizes = memory, _sizes(chunk_bytes)
        # is_full: 1 for a gradient that was not yet taken.
        self.is_full, *places = (
            memory.bytes(start + offset, size)
            for offset, size in zip(_offsets(sizes), sizes, strict=False)
        )
        self.weights, self.gradients = places[: len(chunk_bytes)], places[len(chunk_bytes) :]

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
    memory = own_memory() if connection.is_within_host else None
    if memory is None or (start := memory.reserve(_offsets(_sizes(chunk_bytes))[-1])) is None:
        return None
    data = _OFFER.pack(*memory.address, start)
    connection.send(Header(Kind.OFFER, len(data)), data)
    answer = connection.receive()
    if answer.kind not in (Kind.TAKEN, Kind.DECLINED):
        raise WireError(f"a server answered an offer of memory with {answer.kind.name}")
    connection.checked(answer, 0, 0)
    return Shared(memory, start, chunk_bytes) if answer.kind == Kind.TAKEN else None


def accept_offer(
    connection: Connection, header: Header, chunk_bytes: Sequence[int]
) -> Shared | None:
    """Take the memory that a worker offers, or decline."""
    data = bytearray(connection.checked(header, _OFFER.size, _OFFER.size))
    connection.read_into(memoryview(data))
    process, descriptor, mark, start = _OFFER.unpack(data)
    memory = mapped(Address(process, descriptor, mark))
    connection.send(Header(Kind.DECLINED if memory is None else Kind.TAKEN))
    return None if memory is None else Shared(memory, start, chunk_bytes)


def _sizes(chunk_bytes: Sequence[int]) -> list[int]:
    """Bytes of each place: a byte a chunk that says whether its gradient is there, all weights, all gradients."""
    return [len(chunk_bytes), *chunk_bytes, *chunk_bytes]


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each place begins, on lines of their own, and where the last one ends."""
    return list(
        itertools.accumulate((-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes), initial=0)
    )
