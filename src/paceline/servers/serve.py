"""What a server holds and does: gradients come in part by part, are summed, and weights go out."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from paceline.launch.hosts.pending_peers import PendingPeers
from paceline.launch.hosts.tls import Identity
from paceline.servers.clock import LEASES
from paceline.servers.shared import Shared, accept_offer
from paceline.servers.wire import (
    BULK,
    Connection,
    Header,
    Kind,
    Peer,
    Role,
    Uplink,
    WireError,
    accept,
)
from paceline.strategies.server.shards import Chunk, Shard

_NORMED = 2**17  # elements at a time
# Updates that one worker may have begun to send and that are not made. It has weights with every update that was made
# before its last lease, so those are its leases and the one before; the rest is for servers without chunks.
_BEGUN = 4 * LEASES
_REST_S = 0.05  # when the system has no connection to give


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a contiguous CPU tensor, as bytes that can be sent and received into."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class Acceptor:
    """Listens for peers, lets each prove itself on a thread of its own, and hands those that did to `welcome`.

    A stranger costs a thread for some seconds and nothing else; `refused` counts them.

    Args:
        check: Raises a WireError for a peer that knows the secret and has no business here; it is told why.
        identity: With which connections are encrypted; None if they are not.
    """

    def __init__(
        self,
        sock: socket.socket,
        welcome: Callable[[Connection, Peer], None],
        *,
        secret: bytes,
        layout: bytes,
        check: Callable[[Peer], None] = lambda peer: None,
        identity: Identity | None = None,
    ) -> None:
        self.sock, self.welcome = sock, welcome
        self.accept = partial(accept, secret=secret, layout=layout, check=check, identity=identity)
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


class ShardMemory:
    """A server's elements of every dtype, one after another. Chunks are sent and received without a call of torch:
    each of those gives other threads the chance to run, and a server has many.
    """

    def __init__(self, numels: Mapping[str, int]) -> None:
        self.flat = {
            dtype: torch.empty(numel, dtype=getattr(torch, dtype))
            for dtype, numel in numels.items()
        }
        self.bytes = {dtype: bytes_of(flat) for dtype, flat in self.flat.items()}

    def elements(self, chunk: Chunk) -> torch.Tensor:
        return self.flat[chunk.dtype][chunk.start : chunk.stop]

    def sent(self, chunk: Chunk) -> memoryview:
        """A chunk as it is on the wire."""
        if chunk.wire_dtype != chunk.dtype:
            return bytes_of(self.elements(chunk).to(getattr(torch, chunk.wire_dtype)))
        item_bytes = chunk.num_bytes // (chunk.stop - chunk.start)
        return self.bytes[chunk.dtype][chunk.start * item_bytes : chunk.stop * item_bytes]

    def receive(self, chunk: Chunk, read_into: Callable[[memoryview], None]) -> None:
        """Fill a chunk with what is read."""
        if chunk.wire_dtype == chunk.dtype:
            read_into(self.sent(chunk))
            return
        narrow = torch.empty(chunk.stop - chunk.start, dtype=getattr(torch, chunk.wire_dtype))
        read_into(bytes_of(narrow))
        self.elements(chunk).copy_(narrow)


class _Gathering:
    """The gradients of one update as they come in: a buffer of each dtype for every part.

    optimizer: whose update it is, of a job with several by name; `due` are the chunks, and after them the tables, that
        it has.
    missing: parts that each chunk lacks. unsummed: chunks left of each slice. unfinished: chunks left of all.
    rows: places and values of each table's rows, by table and part.
    held_back: slices that some worker has no gradient for. scale: set when slices may be updated as they come.
    begun_slices: those whose update has begun. unmade: slices left of each chunk.
    sender: who sent the first of it; of all of it if it has one part.
    """

    def __init__(
        self,
        optimizer: str,
        buffers: list[ShardMemory],
        gradients: dict[str, torch.Tensor],
        chunks_of: Sequence[Sequence[int]],
        slices_of: Sequence[Sequence[int]],
        due: Collection[int],
    ) -> None:
        self.optimizer, self.buffers, self.gradients = optimizer, buffers, gradients
        self.arrived: set[tuple[int, int]] = set()
        self.rows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.missing = dict.fromkeys(due, len(buffers))
        self.unfinished = len(due)
        self.unsummed = [len(chunks) for chunks in chunks_of]
        self.unmade = [len(slices) for slices in slices_of]
        self.held_back: set[int] = set()
        self.ready: list[int] = []
        self.begun_slices: set[int] = set()
        self.scale: float | None = None
        self.sender: Peer | None = None


class _Wanted:
    """What a worker has asked for and was not sent yet.

    version: of the weights, at least; None if it has asked for none. unsent_chunks: of them.
    rows: of tables: (version, table, places of rows).
    shared: memory that it shares with this server, if any.
    """

    def __init__(self) -> None:
        self.shared: Shared | None = None
        self.version: int | None = None
        self.unsent_chunks: set[int] = set()
        self.rows: deque[tuple[int, int, torch.Tensor]] = deque()
        self.is_gone = False


@dataclass(frozen=True, slots=True)
class ShardTerms:
    """How workers and a server exchange gradients and weights.

    num_parts: that an update's gradient comes in; they are summed in their order. With one part, an update is one
        worker's.
    end: no version after this one will ever come.
    keeps_sending: whether updates are made while weights are sent, so that each chunk must be copied first.
    measures: whether the sum of a gradient's squares is wanted; else it is told as 0.
    """

    num_parts: int
    end: int
    keeps_sending: bool = False
    measures: bool = False
    compress: str = "none"


@dataclass(frozen=True, slots=True)
class ShardEvents:
    """What a service calls when something happens.

    complete: on some thread, with an update whose gradient is all here, and the sum of its squares.
    ready: on some thread, while `making` is held, with the summed gradients of slices of an update that is open, and
        their scale; to be applied at once.
    lost: on some thread, when a peer is gone or sent what it may not.
    failed: on the thread in which anything else went wrong.
    """

    complete: Callable[[int, float], None]
    ready: Callable[[Mapping[str, torch.Tensor], float], None]
    lost: Callable[[Peer, WireError], None]
    failed: Callable[[Exception], None]


class ShardService:
    """One server's share of the parameters, and what workers send to it and fetch from it.

    weights: its memory; slices are views of it. version: updates made to it.
    """

    def __init__(
        self, shard: Shard, terms: ShardTerms, events: ShardEvents, uplink: Uplink
    ) -> None:
        self.shard, self.terms, self.events, self.uplink = shard, terms, events, uplink
        self.slices_of = [sorted({span.slice for span in chunk.spans}) for chunk in shard.chunks]
        self.chunks_of: list[list[int]] = [[] for _ in shard.slices]
        for number, slices in enumerate(self.slices_of):
            for index in slices:
                self.chunks_of[index].append(number)
        self.weights = ShardMemory(shard.numels())
        self.tables = [
            torch.empty(part.local_shape, dtype=getattr(torch, part.dtype)) for part in shard.tables
        ]
        self.views = {
            **self._views(self.weights),
            **{part.name: table for part, table in zip(shard.tables, self.tables, strict=True)},
        }
        self.begin_at(0)
        self.changed = threading.Condition()  # of versions, over, and what is gathered
        self.making = threading.Lock()  # held while weights change, and until their version says so
        self.gatherings: dict[int, _Gathering] = {}
        self.closed: set[int] = set()  # updates made or dropped
        self.spare: list[ShardMemory] = []
        self.connections: dict[Peer, Connection] = {}
        self.dismissed: set[Peer] = set()
        self.over = False

    def begin_at(self, version: int) -> None:
        """The weights are those after so many updates."""
        self.version = version
        self.versions = [version] * len(self.shard.chunks)  # of each chunk

    def serve(self, connection: Connection, peer: Peer) -> None:
        """Talk to a worker until it leaves, on threads of its own. It has one connection, and none once dismissed."""
        if (
            not self.terms.keeps_sending
        ):  # all wait for the last gradient; else weights would starve
            connection.prioritise(BULK)
        with self.changed:
            if peer in self.connections or peer in self.dismissed:
                connection.close()
                return
            self.connections[peer] = connection
        wanted = _Wanted()
        for work in (self._receive, self._send):
            threading.Thread(
                target=self._guarded,
                args=(work, connection, peer, wanted),
                daemon=True,
                name=f"paceline-worker-{peer.number}",
            ).start()

    def open(self, update: int, scale: float) -> None:
        """From now on a slice is updated as soon as all of its gradient is here; it is the next update to be made."""
        with self.changed:
            if (gathering := self._gathering(update, "")) is None:
                return
            gathering.scale = scale
            ready = self._take(gathering)
        self._apply(gathering, ready)

    def gradients(self, update: int) -> tuple[dict[str, torch.Tensor], set[str]]:
        """The summed gradient of an update that is held, by slice; and the slices that are updated already. There is
        nothing if this server holds nothing of what the update's optimizer updates."""
        gathering = self.gatherings.get(update)
        if gathering is None:
            return {}, set()
        updated = {self.shard.slices[index].name for index in gathering.begun_slices}
        return {**gathering.gradients, **self._of_tables(gathering)}, updated

    def _of_tables(self, gathering: _Gathering) -> dict[str, torch.Tensor]:
        """The gradients of tables as sparse tensors; none of a table that nobody looked into."""
        gradients = {}
        for number, (part, table) in enumerate(zip(self.shard.tables, self.tables, strict=True)):
            parts = [gathering.rows[number, k] for k in range(self.terms.num_parts)]
            if any(len(places) for places, _ in parts):
                gradients[part.name] = torch.sparse_coo_tensor(
                    torch.cat([places for places, _ in parts])[None],
                    torch.cat([values for _, values in parts]),
                    table.shape,
                    check_invariants=False,
                ).coalesce()
        return gradients

    def made(self, update: int, *, version: int | None = None) -> None:
        """The update is in the weights: those who wait for this version get it, which is the next if none is given."""
        with self.changed:
            self._close(update)
            self.begin_at(self.version + 1 if version is None else version)
            self.changed.notify_all()

    def drop(self, update: int) -> None:
        """Forget what has come of an update, and what may still come."""
        with self.changed:
            self._close(update)

    def dismiss(self, worker: int, incarnation: int, *, keeps: Collection[int]) -> None:
        """Talk no more to a worker that was given up, whatever it may still say.

        keeps: its updates that are still to be made. What else it sent is forgotten.
        """
        peer = Peer(Role.DATA, worker, incarnation)
        with self.changed:
            self.dismissed.add(peer)
            connection = self.connections.get(peer)
            for update, gathering in list(self.gatherings.items()):
                is_kept = gathering.unfinished or update in keeps
                if gathering.sender == peer and self.terms.num_parts == 1 and not is_kept:
                    self._forget(update)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify_all()
            connections = list(self.connections.values())
        for connection in connections:
            connection.close()

    def _close(self, update: int) -> None:
        self.closed.add(update)
        self._forget(update)

    def _forget(self, update: int) -> None:
        """Whoever was given the update may send it anew."""
        gathering = self.gatherings.pop(update, None)
        if (
            gathering is not None and gathering.unfinished == 0
        ):  # else a thread may still write into it
            self.spare += gathering.buffers

    def _views(self, memory: ShardMemory) -> dict[str, torch.Tensor]:
        """Each slice's part of the memory, in the slice's shape."""
        views, offsets = {}, dict.fromkeys(memory.flat, 0)
        for part in self.shard.slices:
            start = offsets[part.dtype]
            offsets[part.dtype] += part.numel
            views[part.name] = memory.flat[part.dtype][start : offsets[part.dtype]].view(
                part.local_shape
            )
        return views

    def _guarded(
        self,
        work: Callable[[Connection, Peer, _Wanted], None],
        connection: Connection,
        peer: Peer,
        wanted: _Wanted,
    ) -> None:
        try:
            work(connection, peer, wanted)
        except WireError as error:
            if not self.over:
                self.events.lost(peer, error)  # before the peer learns of it, and others of its end
            connection.close()
            with self.changed:
                wanted.is_gone = True
                self.changed.notify_all()
        except Exception as error:
            self.events.failed(error)
        finally:
            if work == self._receive:  # nothing more of it comes, and nothing writes what is there
                self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        """A worker is gone: what it sent in part will never be whole."""
        with self.changed:
            self.connections.pop(peer, None)
            for update, gathering in list(self.gatherings.items()):
                if gathering.sender == peer and self.terms.num_parts == 1 and gathering.unfinished:
                    self._forget(update)

    def _receive(self, connection: Connection, peer: Peer, wanted: _Wanted) -> None:
        while True:
            header = connection.receive()
            if header.kind == Kind.PULL:
                connection.checked(header, 0, 0)
                self._check_version(header.step)
                with self.changed:
                    wanted.version = header.step
                    wanted.unsent_chunks |= set(self._wanted_chunks(header))
                    self.changed.notify_all()
            elif header.kind == Kind.PULL_ROWS:
                self._check_version(header.step)
                places = self._receive_places(connection, header, self._table(header.chunk), 8)
                with self.changed:
                    if wanted.rows:
                        raise WireError(
                            "a worker asked for rows before it had those that it asked for"
                        )
                    wanted.rows.append((header.step, header.chunk, places))
                    self.changed.notify_all()
            elif header.kind in (Kind.PUSH, Kind.PUSH_REST):
                self._receive_chunk(connection, header, peer, wanted.shared)
            elif header.kind == Kind.PUSH_ROWS:
                self._receive_rows(connection, header, peer)
            elif header.kind == Kind.OFFER and wanted.shared is None:
                wanted.shared = accept_offer(
                    connection, header, [chunk.num_bytes for chunk in self.shard.chunks]
                )
            else:
                raise WireError(f"a worker sent {header.kind.name} to a server")

    def _receive_chunk(
        self, connection: Connection, header: Header, peer: Peer, shared: Shared | None
    ) -> None:
        if header.chunk >= len(self.shard.chunks):
            raise WireError(f"a worker sent chunk {header.chunk} of {len(self.shard.chunks)}")
        chunk = self.shard.chunks[header.chunk]
        if header.dtype != chunk.wire_dtype:
            raise WireError(f"a worker sent {header.dtype} where {chunk.wire_dtype} is due")
        read_into = connection.read_into
        if shared is not None and header.length == 0:
            read_into = partial(shared.take, header.chunk)
            connection.received_bytes += chunk.num_bytes
        else:
            connection.checked(header, chunk.num_bytes, chunk.num_bytes)
        part = self._part(header, peer)
        gathering = self._expected(header, peer, part, header.chunk)
        if gathering is None:
            read_into(memoryview(bytearray(chunk.num_bytes)))
            return
        gathering.buffers[part].receive(chunk, read_into)
        self._arrived(header.step, gathering, header.chunk)

    def _receive_rows(self, connection: Connection, header: Header, peer: Peer) -> None:
        """Gradients of rows: their places, then the values."""
        table = self._table(header.chunk)
        part = self._part(header, peer)
        if header.dtype not in (str(table.dtype).removeprefix("torch."), "bfloat16"):
            raise WireError(
                f"a worker sent rows of {header.dtype} where the table has {table.dtype}"
            )
        dtype = getattr(torch, header.dtype)
        places = self._receive_places(
            connection, header, table, 8 + table.shape[1] * dtype.itemsize
        )
        values = torch.empty(len(places), table.shape[1], dtype=dtype)
        connection.read_into(bytes_of(values))
        number = len(self.shard.chunks) + header.chunk
        gathering = self._expected(header, peer, part, number)
        if gathering is not None:
            gathering.rows[header.chunk, part] = places, values.to(table.dtype)
            self._arrived(header.step, gathering, number)

    def _receive_places(
        self, connection: Connection, header: Header, table: torch.Tensor, row_bytes: int
    ) -> torch.Tensor:
        """Places of rows in this server's part of a table, checked before anything is made of them."""
        connection.checked(header, 0, len(table) * row_bytes)
        if header.length % row_bytes:
            raise WireError(f"a worker sent {header.length} bytes of rows, each of {row_bytes}")
        places = torch.empty(header.length // row_bytes, dtype=torch.int64)
        connection.read_into(bytes_of(places))
        places -= self.shard.tables[header.chunk].start
        if len(places) and not (int(places.min()) >= 0 and int(places.max()) < len(table)):
            raise WireError(
                f"a worker asks for rows that are not on this server, which has {len(table)}"
            )
        return places

    def _wanted_chunks(self, header: Header) -> list[int]:
        """The chunks that a worker asks for: those of the optimizer that updates the chunk that it names, or all."""
        chunks = self.shard.chunks
        if header.chunk > len(chunks):
            raise WireError(f"a worker asks for chunk {header.chunk} of {len(chunks)}")
        return self.shard.updated_by(
            chunks[header.chunk].optimizer if header.chunk < len(chunks) else None
        )

    def _check_version(self, version: int) -> None:
        if version > self.terms.end:
            raise WireError(
                f"a worker asks for version {version}, and the last one of this run is {self.terms.end}"
            )

    def _table(self, number: int) -> torch.Tensor:
        if number >= len(self.tables):
            raise WireError(f"a worker asks for table {number} of {len(self.tables)}")
        return self.tables[number]

    def _part(self, header: Header, peer: Peer) -> int:
        """Which part of an update a worker's gradient is."""
        if header.step < 0:
            raise WireError(f"worker {peer.number} sent a gradient of update {header.step}")
        part = header.worker if self.terms.num_parts > 1 else 0
        if (
            part >= self.terms.num_parts
            or header.worker != peer.number
            or header.incarnation != peer.incarnation
        ):
            raise WireError(f"worker {peer.number} sent a gradient as worker {header.worker}")
        return part

    def _expected(self, header: Header, peer: Peer, part: int, number: int) -> _Gathering | None:
        """Where what follows a header belongs; None if its update was dropped."""
        with self.changed:
            if header.step not in self.gatherings and header.step not in self.closed:
                begun = sum(gathering.sender == peer for gathering in self.gatherings.values())
                if begun >= _BEGUN:
                    raise WireError(
                        f"a worker began to send update {header.step} while {begun} others that it sent "
                        "are not made"
                    )
            gathering = self._gathering(header.step, self._optimizer(number))
            if gathering is not None:
                if number not in gathering.missing:
                    raise WireError(
                        f"a worker sent chunk {number} of update {header.step}, which is of the optimizer "
                        f"'{gathering.optimizer}'"
                    )
                gathering.sender = gathering.sender or peer
                if self.terms.num_parts == 1 and gathering.sender != peer:
                    self._part_with(gathering.sender, peer, header.step)
                if (part, number) in gathering.arrived:
                    raise WireError(f"a worker sent chunk {number} of update {header.step} twice")
                gathering.arrived.add((part, number))
                if header.kind == Kind.PUSH_REST:
                    gathering.held_back |= set(self.slices_of[number])
            return gathering

    def _part_with(self, first: Peer, second: Peer, update: int) -> None:
        """Two workers send one update. Which of them was given it is not known here, so neither is heard any more."""
        error = WireError(
            f"workers {first.number} and {second.number} both sent update {update}, which one was given"
        )
        # Not while `changed` is held.
        threading.Thread(target=self.events.lost, args=(first, error), daemon=True).start()
        if first in self.connections:
            self.connections[first].close()
        raise error

    def _optimizer(self, chunk: int) -> str:
        """Which updates a chunk; "" for tables, and in a shard without chunks."""
        return self.shard.chunks[chunk].optimizer if chunk < len(self.shard.chunks) else ""

    def _gathering(self, update: int, optimizer: str) -> _Gathering | None:
        """What has come of an update; None if it was dropped."""
        if update in self.closed:
            return None
        if update not in self.gatherings:
            buffers = [
                self.spare.pop() if self.spare else ShardMemory(self.shard.numels())
                for _ in range(self.terms.num_parts)
            ]
            chunks = self.shard.updated_by(optimizer)
            tables = range(len(self.shard.chunks), len(self.shard.chunks) + len(self.tables))
            gradients = {
                name: view
                for part, (name, view) in zip(
                    self.shard.slices, self._views(buffers[0]).items(), strict=True
                )
                if part.optimizer == optimizer
            }
            self.gatherings[update] = _Gathering(
                optimizer, buffers, gradients, self.chunks_of, self.slices_of, [*chunks, *tables]
            )
        return self.gatherings[update]

    def _arrived(self, update: int, gathering: _Gathering, number: int) -> None:
        """Whoever brings the last part of a chunk sums it and makes what is complete; whoever is last of all tells."""
        with self.changed:
            gathering.missing[number] -= 1
            if gathering.missing[number]:
                return
        if number < len(self.shard.chunks):
            self._sum(gathering, number)
        with self.changed:
            gathering.unfinished -= 1
            if gathering.unfinished or update in self.closed:
                return
        squares = 0.0
        if self.terms.measures:
            squares = sum(
                map(
                    _squares,
                    (
                        *(gradient.view(-1) for gradient in gathering.gradients.values()),
                        *(gradient.values() for gradient in self._of_tables(gathering).values()),
                    ),
                )
            )
        self.events.complete(update, squares)

    def _sum(self, gathering: _Gathering, number: int) -> None:
        """All parts of a chunk are here."""
        chunk = self.shard.chunks[number]
        first, *others = (buffer.elements(chunk) for buffer in gathering.buffers)
        for other in others:
            first.add_(other)
        with self.changed:
            for index in self.slices_of[number]:
                gathering.unsummed[index] -= 1
                if not gathering.unsummed[index]:
                    gathering.ready.append(index)
            ready = self._take(gathering)
        self._apply(gathering, ready)

    def _take(self, gathering: _Gathering) -> list[int]:
        """The slices that may be updated now."""
        if gathering.scale is None:
            return []
        slices = [index for index in gathering.ready if index not in gathering.held_back]
        gathering.ready = []
        gathering.begun_slices |= set(slices)
        return slices

    def _apply(self, gathering: _Gathering, slices: Sequence[int]) -> None:
        """Update slices, and let those who wait for them have them."""
        if not slices:
            return
        assert gathering.scale is not None
        names = [self.shard.slices[index].name for index in slices]
        with self.making:
            self.events.ready({name: gathering.gradients[name] for name in names}, gathering.scale)
        with self.changed:
            for number in (number for index in slices for number in self.chunks_of[index]):
                gathering.unmade[number] -= 1
                if not gathering.unmade[number]:
                    self.versions[number] = self.version + 1
            self.changed.notify_all()

    def _send(self, connection: Connection, peer: Peer, wanted: _Wanted) -> None:
        """Send the weights that were asked for, when they are there: first layers first."""
        copy = memoryview(
            bytearray(max((chunk.num_bytes for chunk in self.shard.chunks), default=0))
        )
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: (
                        self.over
                        or wanted.is_gone
                        or self._has_rows(wanted)
                        or self._chunk(wanted) is not None
                    )
                )
            if self.over or wanted.is_gone:
                return
            if self._has_rows(wanted):
                self._send_rows(connection, *wanted.rows.popleft())
                continue
            with (
                self.uplink.after()
            ):  # meanwhile weights of earlier layers may have come to be there
                self._send_chunk(connection, wanted, copy)

    def _send_chunk(self, connection: Connection, wanted: _Wanted, copy: memoryview) -> None:
        with self.changed:
            number, version = self._chunk(wanted), wanted.version
            if number is None:  # the worker asked anew
                return
            assert version is not None
            wanted.unsent_chunks.discard(number)
        chunk = self.shard.chunks[number]
        place = copy[: chunk.num_bytes]
        if wanted.shared is not None:
            place = wanted.shared.weights[number]
        if self.terms.keeps_sending:
            with self.making:  # also while they are rounded for the wire
                version, place[:] = self.version, self.weights.sent(chunk)
            data = place
        else:
            data = self.weights.sent(chunk)
            if wanted.shared is not None:
                place[:] = data
        header = Header(Kind.WEIGHTS, chunk.num_bytes, chunk.wire_dtype, step=version, chunk=number)
        if wanted.shared is None:
            connection.send(header, data)
        else:
            connection.send(replace(header, length=0))
            connection.sent_bytes += chunk.num_bytes

    def _has_rows(self, wanted: _Wanted) -> bool:
        return bool(wanted.rows) and wanted.rows[0][0] <= self.version

    def _chunk(self, wanted: _Wanted) -> int | None:
        """The first chunk, in the order of layers, that can be sent."""
        if wanted.version is None:
            return None
        return max(
            (number for number in wanted.unsent_chunks if self.versions[number] >= wanted.version),
            default=None,
        )

    def _send_rows(
        self, connection: Connection, version: int, number: int, places: torch.Tensor
    ) -> None:
        with self.making:
            version, rows = self.version, self.tables[number][places]
        if self.terms.compress == "bf16" and rows.is_floating_point():
            rows = rows.bfloat16()
        data = bytes_of(rows)
        connection.send(
            Header(
                Kind.ROWS,
                len(data),
                str(rows.dtype).removeprefix("torch."),
                step=version,
                chunk=number,
            ),
            data,
        )


def _squares(flat: torch.Tensor) -> float:
    """Their sum, in float64. Part by part: a copy of all in float64 takes eight times as long as what fits a cache."""
    return sum(
        float(torch.linalg.vector_norm(part, dtype=_wide(part))) ** 2
        for part in flat.split(_NORMED)
    )


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def listen_to(
    connection: Connection,
    peer: Peer,
    *,
    tell: Callable[[Peer, dict[str, Any]], None],
    on_lost: Callable[[Peer, WireError], None],
) -> None:
    """Hear a peer's messages on a thread of their own until it is gone."""

    def work() -> None:
        try:
            while True:
                tell(peer, connection.receive_message())
        except WireError as error:
            on_lost(peer, error)  # before the peer learns of it
            connection.close()

    threading.Thread(
        target=work, name=f"paceline-{Role(peer.role).name.lower()}-{peer.number}", daemon=True
    ).start()
