"""A worker's side: gradients leave for the servers while backward goes on, and weights come back."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from paceline.base.waiting import waiting
from paceline.servers.shard_memory import bytes_of
from paceline.servers.shared import offer
from paceline.servers.wire import Connection, Header, Kind, Uplink, WireError
from paceline.strategies.data.arrivals import GradientArrivals
from paceline.strategies.server.shards import RowSlice, ServedParameter, Shard
from paceline.strategies.synchroniser import Synchroniser

if TYPE_CHECKING:
    from torch import nn


def served_parameters(parameters: Mapping[str, nn.Parameter]) -> list[ServedParameter]:
    """Parameters as servers see them."""
    return [
        ServedParameter(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.element_size())
        for name, p in parameters.items()
    ]


def rows(tensor: torch.Tensor, part: RowSlice) -> torch.Tensor:
    """A slice's rows of a whole tensor."""
    return tensor[part.start : part.stop] if part.shape else tensor


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Elements in the host's memory. copied: when they are there, of those that a GPU is still copying; None if so."""

    elements: memoryview
    copied: torch.Event | None = None

    def __getitem__(self, part: slice) -> Outgoing:
        return replace(self, elements=self.elements[part])

    def when_there(self) -> memoryview:
        if self.copied is not None:
            self.copied.synchronize()
        return self.elements


class ServerConnection:
    """A worker's connection to one server: a thread that sends gradients and one that receives weights.

    received: the weights that were asked for last, a tensor for each chunk, as they are on the wire.
    versions: updates that each of those that are here has.
    filled_s: when the last of them came, as `time.perf_counter` has it.
    """

    def __init__(
        self,
        connection: Connection,
        shard: Shard,
        *,
        worker: int,
        incarnation: int,
        uplink: Uplink,
        compress: str = "none",
    ) -> None:
        self.connection, self.shard = connection, shard
        self.worker, self.incarnation = worker, incarnation
        self.uplink, self.compress = uplink, compress
        self.rows: torch.Tensor | None = None
        self.asked_rows = (-1, 0)  # table, number of rows
        self.shared = offer(connection, [chunk.num_bytes for chunk in shard.chunks])
        self.received = [
            torch.empty(chunk.stop - chunk.start, dtype=getattr(torch, chunk.wire_dtype))
            if self.shared is None
            else torch.frombuffer(
                self.shared.weights[number], dtype=getattr(torch, chunk.wire_dtype)
            )
            for number, chunk in enumerate(shard.chunks)
        ]
        self.outbox: queue.PriorityQueue[tuple[float, float, Header | None, list[Outgoing]]] = (
            queue.PriorityQueue()
        )
        self.changed = threading.Condition()
        self.error: WireError | None = None
        self.versions, self.missing, self.filled_s = list[int](), set[int](), 0.0
        for work in (self._send, self._receive):
            threading.Thread(
                target=self._guarded, args=(work,), name="paceline-link", daemon=True
            ).start()

    def push(self, update: int, number: int, parts: list[Outgoing], *, is_whole: bool) -> None:
        """Send a chunk when the link is free. Its memory must not change until then.

        is_whole: whether backward has made all of it.
        """
        chunk = self.shard.chunks[number]
        kind = Kind.PUSH if is_whole else Kind.PUSH_REST
        header = Header(
            kind, chunk.num_bytes, chunk.wire_dtype, self.worker, self.incarnation, update, number
        )
        self.outbox.put(
            (update, -number, header, parts)
        )  # what the next forward needs first goes first

    def ask(self, version: int, optimizer: str | None = None) -> None:
        """Ask for weights with at least so many updates: all, or those that an optimizer updates."""
        chunks = self.shard.updated_by(optimizer)
        with self.changed:
            self.missing |= set(chunks)
            self.versions = []
        if chunks:
            header = Header(
                Kind.PULL,
                worker=self.worker,
                incarnation=self.incarnation,
                step=version,
                chunk=len(self.shard.chunks) if optimizer is None else chunks[0],
            )
            self.outbox.put((-1, version, header, []))

    def push_rows(self, update: int, table: int, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Send the gradients of rows of a table, after all else of the update."""
        if self.compress == "bf16" and values.is_floating_point():
            values = values.bfloat16()
        parts = [Outgoing(bytes_of(ids)), Outgoing(bytes_of(values.contiguous()))]
        num_bytes = sum(len(part.elements) for part in parts)
        header = Header(
            Kind.PUSH_ROWS,
            num_bytes,
            str(values.dtype).removeprefix("torch."),
            self.worker,
            self.incarnation,
            update,
            table,
        )
        self.outbox.put((update, table + 1, header, parts))

    def ask_rows(self, table: int, ids: torch.Tensor, version: int) -> None:
        """Ask for rows of a table with at least so many updates; `wait_rows` returns them."""
        with self.changed:
            self.rows, self.asked_rows = None, (table, len(ids))
        elements = bytes_of(ids)
        header = Header(
            Kind.PULL_ROWS, len(elements), "none", self.worker, self.incarnation, version, table
        )
        self.outbox.put((-1, math.inf, header, [Outgoing(elements)]))

    def wait_rows(self) -> torch.Tensor:
        with waiting, self.changed:
            self.changed.wait_for(lambda: self.error is not None or self.rows is not None)
            if self.rows is None:
                assert self.error is not None
                raise self.error
            return self.rows

    def is_complete(self) -> bool:
        """Whether all that was asked for is here."""
        return not self.missing

    def wait(self, number: int) -> None:
        """Wait for a chunk of what was asked for."""
        with waiting, self.changed:
            self.changed.wait_for(lambda: self.error is not None or number not in self.missing)
            if self.error is not None:
                raise self.error

    def close(self) -> None:
        """Send what is left, then leave."""
        self.outbox.put((math.inf, 0, None, []))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except WireError as error:
            with self.changed:
                self.error = self.error or error
                self.changed.notify_all()

    def _send(self) -> None:
        while True:
            _, _, header, outgoing = self.outbox.get()
            if header is None:
                break
            parts = [part.when_there() for part in outgoing]
            if header.kind in (Kind.PULL, Kind.PULL_ROWS):
                self.connection.send(header, *parts)
            else:
                self._send_gradient(header, parts)
        self.connection.close()

    def _send_gradient(self, header: Header, parts: list[memoryview]) -> None:
        if (
            self.shared is not None
            and header.kind != Kind.PUSH_ROWS
            and self.shared.put(header.chunk, parts)
        ):
            self.connection.send(replace(header, length=0))
            self.connection.sent_bytes += header.length
            return
        with self.uplink.first():
            self.connection.send(header, *parts)

    def _receive(self) -> None:
        while True:
            header = self.connection.receive()
            if header.kind == Kind.ROWS:
                self._receive_rows(header)
                continue
            if header.kind != Kind.WEIGHTS or header.chunk >= len(self.shard.chunks):
                raise WireError(f"a server sent {header.kind.name} {header.chunk} to a worker")
            chunk = self.shard.chunks[header.chunk]
            if header.dtype != chunk.wire_dtype or header.chunk not in self.missing:
                raise WireError(
                    f"a server sent {header.dtype} of chunk {header.chunk}, which was not asked for"
                )
            if self.shared is None:
                self.connection.checked(header, chunk.num_bytes, chunk.num_bytes)
                self.connection.read_into(bytes_of(self.received[header.chunk]))
            else:
                self.connection.checked(header, 0, 0)
                self.connection.received_bytes += chunk.num_bytes
            with self.changed:
                self.missing.discard(header.chunk)
                self.versions.append(header.step)
                self.filled_s = time.perf_counter()
                self.changed.notify_all()

    def _receive_rows(self, header: Header) -> None:
        table, count = self.asked_rows
        dtype = getattr(torch, header.dtype, None)
        if header.chunk != table or self.rows is not None or dtype is None:
            raise WireError(f"a server sent rows of table {header.chunk}, which were not asked for")
        rows = torch.empty(count, self.shard.tables[table].shape[1], dtype=dtype)
        self.connection.checked(header, rows.nbytes, rows.nbytes)
        self.connection.read_into(bytes_of(rows))
        with self.changed:
            self.rows = rows
            self.changed.notify_all()


class GradientSender:
    """Sends chunks of the gradients that parameters have; zeros for a parameter that has none.

    A gradient on a GPU is copied to pinned memory on a stream of its own while the GPU goes on; the link waits for it
    before it sends.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], links: Sequence[ServerConnection]
    ) -> None:
        self.parameters, self.links = parameters, links
        self.sent: dict[str, Outgoing] = {}
        self.copying: dict[torch.device, torch.cuda.Stream] = {}

    def forget(self) -> None:
        """The next update has other gradients."""
        self.sent = {}

    def push(self, update: int, server: int, number: int, *, is_whole: bool) -> None:
        """Send a chunk of an update. is_whole: whether backward has made all of it."""
        link = self.links[server]
        chunk, parts = link.shard.chunks[number], []
        for span in chunk.spans:
            part = link.shard.slices[span.slice]
            whole = self._sent(part.name, chunk.wire_dtype)
            item_bytes = len(whole.elements) // self.parameters[part.name].numel()
            first = part.first_element + span.start
            parts.append(whole[first * item_bytes : (first + span.stop - span.start) * item_bytes])
        link.push(update, number, parts, is_whole=is_whole)

    def _sent(self, name: str, wire_dtype: str) -> Outgoing:
        """A parameter's gradient as it is on the wire, row after row; made once an update."""
        if name not in self.sent:
            p, dtype = self.parameters[name], getattr(torch, wire_dtype)
            gradient = torch.zeros(p.shape, dtype=dtype) if p.grad is None else p.grad.detach()
            self.sent[name] = (
                self._copied(gradient, dtype)
                if gradient.is_cuda
                else Outgoing(bytes_of(gradient.to(dtype).contiguous()))
            )
        return self.sent[name]

    def _copied(self, gradient: torch.Tensor, dtype: torch.dtype) -> Outgoing:
        """A copy that is under way, behind all that makes the gradient; the host does not wait."""
        if gradient.device not in self.copying:
            self.copying[gradient.device] = torch.cuda.Stream(gradient.device)
        stream = self.copying[gradient.device]
        stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(stream):
            host = torch.empty(gradient.shape, dtype=dtype, pin_memory=True)
            host.copy_(gradient.to(dtype).contiguous(), non_blocking=True)
            gradient.record_stream(stream)
            return Outgoing(bytes_of(host), stream.record_event())


class Pusher(Synchroniser):
    """Sends each chunk of the gradient as soon as backward has made all of it; see `Synchroniser`."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        links: Sequence[ServerConnection],
        settle: Callable[[], None],
    ) -> None:
        """
        Args:
            settle: Called before the first backward of an update, when weights may change no more.
        """
        self.parameters, self.links, self.settle = parameters, links, settle
        self.names = {p: name for name, p in parameters.items()}
        # Chunks that wait for each parameter: (server, number of the chunk).
        self.waiting: dict[str, list[tuple[int, int]]] = {name: [] for name in parameters}
        self.needs: dict[tuple[int, int], int] = {}
        for server, link in enumerate(links):
            for number, chunk in enumerate(link.shard.chunks):
                names = {link.shard.slices[span.slice].name for span in chunk.spans}
                self.needs[server, number] = len(names)
                for name in names:
                    self.waiting[name].append((server, number))
        self.update = -1
        self.sender = GradientSender(parameters, links)
        self.arrivals = GradientArrivals(
            self.names.__getitem__, lambda p: self.names[p] in self.sender.sent
        )
        self.missing: dict[tuple[int, int], int] = {}
        self.armed = False
        for p in parameters.values():
            p.register_post_accumulate_grad_hook(self._arrived)

    def begin(self, *, last: bool) -> None:
        if not self.missing:
            self.settle()
            self.arrivals.begin()
            self.missing = dict(self.needs)
            self.sender.forget()
        self.armed = last

    def unused(self) -> set[str]:
        return {name for name, p in self.parameters.items() if p.grad is None}

    def finish(self) -> None:
        """What backward did not reach leaves too; all of it is on its way when this returns."""
        self.armed = False
        self.arrivals.end()
        unused = {self.names[p] for p in self.parameters.values() if p not in self.arrivals.arrived}
        incomplete = {place for name in unused for place in self.waiting[name]}
        for server, number in [place for place, count in self.missing.items() if count]:
            self.sender.push(
                self.update, server, number, is_whole=(server, number) not in incomplete
            )
        self.missing = {}
        self.sender.forget()

    @property
    def sent_bytes(self) -> float:
        """What this worker has sent to servers so far."""
        return float(sum(link.connection.sent_bytes for link in self.links))

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self.arrivals.add(parameter, last=self.armed):
            return
        for place in self.waiting[self.names[parameter]]:  # type: ignore[index]
            self.missing[place] -= 1
            if not self.missing[place]:
                self.sender.push(self.update, *place, is_whole=True)
