"""What a server holds and does: gradients come in part by part, are summed, and weights go out."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from paceline.strategies.server.shards import Chunk, Shard
from paceline.strategies.server.wire import Connection, Header, Kind, Peer, Role, WireError, accept

_HANDSHAKES = 64  # at a time


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a contiguous CPU tensor, as bytes that can be sent and received into."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class Door:
    """Listens for peers, lets each prove itself on a thread of its own, and hands those that did to `welcome`.

    A stranger costs a thread for some seconds and nothing else; `refused` counts them.
    """

    def __init__(self, sock: socket.socket, welcome: Callable[[Connection, Peer], None], *, secret: bytes,
                 layout: bytes) -> None:
        self.sock, self.welcome, self.secret, self.layout = sock, welcome, secret, layout
        self.refused = 0
        self.places = threading.BoundedSemaphore(_HANDSHAKES)
        threading.Thread(target=self._listen, name="paceline-door", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.sock.getsockname()[:2]
        return host, port

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self.sock.accept()
            except OSError:
                return
            if not self.places.acquire(blocking=False):
                sock.close()
                self.refused += 1
                continue
            threading.Thread(target=self._admit, args=(sock,), name="paceline-admit", daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            connection, peer = accept(sock, secret=self.secret, layout=self.layout)
        except (WireError, OSError):
            self.refused += 1
            return
        finally:
            self.places.release()
        self.welcome(connection, peer)


class _Gathering:
    """The gradients of one update as they come in: a buffer of each dtype for every part."""

    def __init__(self, buffers: list[dict[str, torch.Tensor]], num_chunks: int) -> None:
        self.buffers = buffers
        self.arrived: set[tuple[int, int]] = set()
        self.missing = [len(buffers)] * num_chunks
        self.unsummed = num_chunks


class Exchange:
    """One server's share of the parameters, and what workers send to it and fetch from it.

    weights: its memory, by dtype; slices are views of it. version: updates made to it.

    Args:
        num_parts: Parts that an update's gradient comes in; they are summed in their order.
        keeps_sending: Whether updates are made while weights are sent, so that what is sent must be copied first.
        on_held: Called on some thread with an update whose gradient is all here, and the sum of its squares.
        on_lost: Called on some thread when a peer is gone or sent what it may not.
    """

    def __init__(self, shard: Shard, *, num_parts: int, keeps_sending: bool, version: int,
                 on_held: Callable[[int, float], None], on_lost: Callable[[Peer, WireError], None]) -> None:
        self.shard, self.num_parts, self.keeps_sending, self.version = shard, num_parts, keeps_sending, version
        self.on_held, self.on_lost = on_held, on_lost
        self.weights = self._memory()
        self.views = self._views(self.weights)
        self.changed = threading.Condition()  # of version, over, and what is gathered
        self.making = threading.Lock()  # held while weights change
        self.gatherings: dict[int, _Gathering] = {}
        self.closed: set[int] = set()  # updates made or dropped
        self.spare: list[dict[str, torch.Tensor]] = []
        self.connections: list[Connection] = []
        self.over = False

    def serve(self, connection: Connection, peer: Peer) -> None:
        """Talk to a worker until it leaves, on threads of its own."""
        self.connections.append(connection)
        wanted: list[int] = []
        for work in (self._receive, self._send):
            threading.Thread(target=self._guarded, args=(work, connection, peer, wanted), daemon=True,
                             name=f"paceline-worker-{peer.number}").start()

    def gradients(self, update: int) -> dict[str, torch.Tensor]:
        """The summed gradient of an update that is held, by slice."""
        return self._views(self.gatherings[update].buffers[0])

    def made(self, update: int) -> None:
        """The update is in the weights: those who wait for this version get it."""
        with self.changed:
            self._close(update)
            self.version += 1
            self.changed.notify_all()

    def drop(self, update: int) -> None:
        """Forget what has come of an update, and what may still come."""
        with self.changed:
            self._close(update)

    def close(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify_all()
        for connection in self.connections:
            connection.close()

    def _close(self, update: int) -> None:
        self.closed.add(update)
        gathering = self.gatherings.pop(update, None)
        if gathering is not None and gathering.unsummed == 0:  # else a thread may still write into it
            self.spare += gathering.buffers

    def _memory(self) -> dict[str, torch.Tensor]:
        return {dtype: torch.empty(numel, dtype=getattr(torch, dtype)) for dtype, numel in self.shard.numels().items()}

    def _views(self, memory: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each slice's part of the memory, in the slice's shape."""
        found, at = {}, dict.fromkeys(memory, 0)
        for part in self.shard.slices:
            start = at[part.dtype]
            at[part.dtype] += part.numel
            found[part.name] = memory[part.dtype][start:at[part.dtype]].view(part.local_shape)
        return found

    def _guarded(self, work: Callable[[Connection, Peer, list[int]], None], connection: Connection, peer: Peer,
                 wanted: list[int]) -> None:
        try:
            work(connection, peer, wanted)
        except WireError as error:
            connection.close()
            with self.changed:
                wanted.append(-1)
                self.changed.notify_all()
            if not self.over:
                self.on_lost(peer, error)

    def _receive(self, connection: Connection, peer: Peer, wanted: list[int]) -> None:
        while True:
            header = connection.receive()
            if header.kind == Kind.PULL:
                connection.checked(header, 0, 0)
                with self.changed:
                    wanted.append(header.step)
                    self.changed.notify_all()
            elif header.kind == Kind.PUSH:
                self._receive_chunk(connection, header, peer)
            else:
                raise WireError(f"a worker sent {header.kind.name} to a server")

    def _receive_chunk(self, connection: Connection, header: Header, peer: Peer) -> None:
        if header.chunk >= len(self.shard.chunks):
            raise WireError(f"a worker sent chunk {header.chunk} of {len(self.shard.chunks)}")
        chunk = self.shard.chunks[header.chunk]
        if header.dtype != chunk.dtype:
            raise WireError(f"a worker sent {header.dtype} where {chunk.dtype} is held")
        connection.checked(header, chunk.num_bytes, chunk.num_bytes)
        part = header.worker if self.num_parts > 1 else 0
        if part >= self.num_parts or header.worker != peer.number or header.incarnation != peer.incarnation:
            raise WireError(f"worker {peer.number} sent a gradient as worker {header.worker}")
        gathering = self._gathering(header.step, part, header.chunk)
        if gathering is None:
            connection.read_into(memoryview(bytearray(chunk.num_bytes)))
            return
        connection.read_into(bytes_of(gathering.buffers[part][chunk.dtype][chunk.start:chunk.stop]))
        self._arrived(header.step, gathering, header.chunk, chunk)

    def _gathering(self, update: int, part: int, chunk: int) -> _Gathering | None:
        """Where a chunk goes; None if its update was dropped."""
        with self.changed:
            if update in self.closed:
                return None
            if update not in self.gatherings:
                buffers = [self.spare.pop() if self.spare else self._memory() for _ in range(self.num_parts)]
                self.gatherings[update] = _Gathering(buffers, len(self.shard.chunks))
            gathering = self.gatherings[update]
            if (part, chunk) in gathering.arrived:
                raise WireError(f"a worker sent chunk {chunk} of update {update} twice")
            gathering.arrived.add((part, chunk))
            return gathering

    def _arrived(self, update: int, gathering: _Gathering, number: int, chunk: Chunk) -> None:
        """Whoever brings the last part of a chunk sums it; whoever sums the last chunk tells."""
        with self.changed:
            gathering.missing[number] -= 1
            if gathering.missing[number]:
                return
        first, *others = (buffer[chunk.dtype][chunk.start:chunk.stop] for buffer in gathering.buffers)
        for other in others:
            first.add_(other)
        with self.changed:
            gathering.unsummed -= 1
            if gathering.unsummed or update in self.closed:
                return
        self.on_held(update, sum(float(torch.linalg.vector_norm(flat, dtype=_wide(flat))) ** 2
                                 for flat in gathering.buffers[0].values()))

    def _send(self, connection: Connection, peer: Peer, wanted: list[int]) -> None:
        """Send the weights that were asked for, when they are there: first layers first."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.over or (wanted and wanted[0] <= self.version))
                if self.over or wanted.pop(0) < 0:
                    return
            with self.making:
                version = self.version
                memory = ({dtype: flat.clone() for dtype, flat in self.weights.items()} if self.keeps_sending
                          else self.weights)
            for number in reversed(range(len(self.shard.chunks))):
                chunk = self.shard.chunks[number]
                connection.send(Header(Kind.WEIGHTS, chunk.num_bytes, chunk.dtype, step=version, chunk=number),
                                bytes_of(memory[chunk.dtype][chunk.start:chunk.stop]))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def listen_to(connection: Connection, peer: Peer, *, tell: Callable[[Peer, dict[str, Any]], None],
              on_lost: Callable[[Peer, WireError], None]) -> None:
    """Hear a peer's messages on a thread of their own until it is gone."""
    def work() -> None:
        try:
            while True:
                tell(peer, connection.receive_message())
        except WireError as error:
            connection.close()
            on_lost(peer, error)

    threading.Thread(target=work, name=f"paceline-{Role(peer.role).name.lower()}-{peer.number}", daemon=True).start()
