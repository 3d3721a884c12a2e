"""What one worker sends to a server and is sent, on two threads of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from paceline.servers.serve import ShardService
from paceline.servers.shard_memory import bytes_of
from paceline.servers.shared import Shared, accept_offer
from paceline.servers.wire import BULK, Connection, Header, Kind, Peer, WireError


def serve(service: ShardService, connection: Connection, peer: Peer) -> None:
    """Talk to a worker until it leaves. It has one connection, and none once dismissed."""
    if not service.terms.keeps_sending:  # all wait for the last gradient; else weights would starve
        connection.prioritise(BULK)
    with service.changed:
        if peer in service.connections or peer in service.dismissed:
            connection.close()
            return
        service.connections[peer] = connection
    _Session(service, connection, peer)


class _Session:
    """A worker's connection to a server, and what the worker has asked for and was not sent yet.

    wanted: version of the weights, at least; None if it has asked for none. unsent_chunks: of them.
    rows: of tables: (version, table, places of rows).
    shared: memory that it shares with this server, if any.
    """

    def __init__(self, service: ShardService, connection: Connection, peer: Peer) -> None:
        self.service, self.connection, self.peer = service, connection, peer
        self.shard, self.changed = service.shard, service.changed
        self.shared: Shared | None = None
        self.wanted: int | None = None
        self.unsent_chunks: set[int] = set()
        self.rows: deque[tuple[int, int, torch.Tensor]] = deque()
        self.is_gone = False
        for work in (self._receive, self._send):
            threading.Thread(
                target=self._guarded,
                args=(work,),
                daemon=True,
                name=f"paceline-worker-{peer.number}",
            ).start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except WireError as error:
            if not self.service.over:
                # Before the peer learns of it, and others of its end.
                self.service.events.lost(self.peer, error)
            self.connection.close()
            with self.changed:
                self.is_gone = True
                self.changed.notify_all()
        except Exception as error:
            self.service.events.failed(error)
        finally:
            if work == self._receive:  # nothing more of it comes, and nothing writes what is there
                self.service.leave(self.peer)

    def _receive(self) -> None:
        while True:
            header = self.connection.receive()
            if header.kind == Kind.PULL:
                self.connection.checked(header, 0, 0)
                self._check_version(header.step)
                with self.changed:
                    self.wanted = header.step
                    self.unsent_chunks |= set(self._wanted_chunks(header))
                    self.changed.notify_all()
            elif header.kind == Kind.PULL_ROWS:
                self._check_version(header.step)
                places = self._receive_places(header, self._table(header.chunk), 8)
                with self.changed:
                    if self.rows:
                        raise WireError(
                            "a worker asked for rows before it had those that it asked for"
                        )
                    self.rows.append((header.step, header.chunk, places))
                    self.changed.notify_all()
            elif header.kind in (Kind.PUSH, Kind.PUSH_REST):
                self._receive_chunk(header)
            elif header.kind == Kind.PUSH_ROWS:
                self._receive_rows(header)
            elif header.kind == Kind.OFFER and self.shared is None:
                self.shared = accept_offer(
                    self.connection,
                    header,
                    [chunk.num_bytes for chunk in self.shard.chunks],
                )
            else:
                raise WireError(f"a worker sent {header.kind.name} to a server")

    def _receive_chunk(self, header: Header) -> None:
        if header.chunk >= len(self.shard.chunks):
            raise WireError(f"a worker sent chunk {header.chunk} of {len(self.shard.chunks)}")
        chunk = self.shard.chunks[header.chunk]
        if header.dtype != chunk.wire_dtype:
            raise WireError(f"a worker sent {header.dtype} where {chunk.wire_dtype} is due")
        read_into = self.connection.read_into
        if self.shared is not None and header.length == 0:
            read_into = partial(self.shared.take, header.chunk)
            self.connection.received_bytes += chunk.num_bytes
        else:
            self.connection.checked(header, chunk.num_bytes, chunk.num_bytes)
        part = self._part(header)
        gathering = self.service.expected(header, self.peer, part, header.chunk)
        if gathering is None:
            read_into(memoryview(bytearray(chunk.num_bytes)))
            return
        gathering.buffers[part].receive(chunk, read_into)
        self.service.arrived(header.step, gathering, header.chunk)

    def _receive_rows(self, header: Header) -> None:
        """Gradients of rows: their places, then the values."""
        table = self._table(header.chunk)
        part = self._part(header)
        if header.dtype not in (str(table.dtype).removeprefix("torch."), "bfloat16"):
            raise WireError(
                f"a worker sent rows of {header.dtype} where the table has {table.dtype}"
            )
        dtype = getattr(torch, header.dtype)
        places = self._receive_places(header, table, 8 + table.shape[1] * dtype.itemsize)
        values = torch.empty(len(places), table.shape[1], dtype=dtype)
        self.connection.read_into(bytes_of(values))
        number = len(self.shard.chunks) + header.chunk
        gathering = self.service.expected(header, self.peer, part, number)
        if gathering is not None:
            gathering.rows[header.chunk, part] = places, values.to(table.dtype)
            self.service.arrived(header.step, gathering, number)

    def _receive_places(self, header: Header, table: torch.Tensor, row_bytes: int) -> torch.Tensor:
        """Places of rows in this server's part of a table, checked before anything is made of them."""
        self.connection.checked(header, 0, len(table) * row_bytes)
        if header.length % row_bytes:
            raise WireError(f"a worker sent {header.length} bytes of rows, each of {row_bytes}")
        places = torch.empty(header.length // row_bytes, dtype=torch.int64)
        self.connection.read_into(bytes_of(places))
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
        if version > self.service.terms.end:
            raise WireError(
                f"a worker asks for version {version}, and the last one of this run is {self.service.terms.end}"
            )

    def _table(self, number: int) -> torch.Tensor:
        if number >= len(self.service.tables):
            raise WireError(f"a worker asks for table {number} of {len(self.service.tables)}")
        return self.service.tables[number]

    def _part(self, header: Header) -> int:
        """Which part of an update a worker's gradient is."""
        if header.step < 0:
            raise WireError(f"worker {self.peer.number} sent a gradient of update {header.step}")
        part = header.worker if self.service.terms.num_parts > 1 else 0
        if (
            part >= self.service.terms.num_parts
            or header.worker != self.peer.number
            or header.incarnation != self.peer.incarnation
        ):
            raise WireError(f"worker {self.peer.number} sent a gradient as worker {header.worker}")
        return part

    def _send(self) -> None:
        """Send the weights that were asked for, when they are there: first layers first."""
        copy = memoryview(
            bytearray(max((chunk.num_bytes for chunk in self.shard.chunks), default=0))
        )
        while True:
            with self.changed:
                self.changed.wait_for(
                    lambda: (
                        self.service.over
                        or self.is_gone
                        or self._has_rows()
                        or self._chunk() is not None
                    )
                )
            if self.service.over or self.is_gone:
                return
            if self._has_rows():
                self._send_rows(*self.rows.popleft())
                continue
            with (
                self.service.uplink.after()
            ):  # meanwhile weights of earlier layers may have come to be there
                self._send_chunk(copy)

    def _send_chunk(self, copy: memoryview) -> None:
        with self.changed:
            number, version = self._chunk(), self.wanted
            if number is None:  # the worker asked anew
                return
            assert version is not None
            self.unsent_chunks.discard(number)
        chunk = self.shard.chunks[number]
        place = copy[: chunk.num_bytes]
        if self.shared is not None:
            place = self.shared.weights[number]
        if self.service.terms.keeps_sending:
            with self.service.making:  # also while they are rounded for the wire
                version, place[:] = self.service.version, self.service.weights.sent(chunk)
            data = place
        else:
            data = self.service.weights.sent(chunk)
            if self.shared is not None:
                place[:] = data
        header = Header(Kind.WEIGHTS, chunk.num_bytes, chunk.wire_dtype, step=version, chunk=number)
        if self.shared is None:
            self.connection.send(header, data)
        else:
            self.connection.send(replace(header, length=0))
            self.connection.sent_bytes += chunk.num_bytes

    def _has_rows(self) -> bool:
        return bool(self.rows) and self.rows[0][0] <= self.service.version

    def _chunk(self) -> int | None:
        """The first chunk, in the order of layers, that can be sent."""
        if self.wanted is None:
            return None
        return max(
            (
                number
                for number in self.unsent_chunks
                if self.service.versions[number] >= self.wanted
            ),
            default=None,
        )

    def _send_rows(self, version: int, number: int, places: torch.Tensor) -> None:
        with self.service.making:
            version, rows = self.service.version, self.service.tables[number][places]
        if self.service.terms.compress == "bf16" and rows.is_floating_point():
            rows = rows.bfloat16()
        data = bytes_of(rows)
        self.connection.send(
            Header(
                Kind.ROWS,
                len(data),
                str(rows.dtype).removeprefix("torch."),
                step=version,
                chunk=number,
            ),
            data,
        )
