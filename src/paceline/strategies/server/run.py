"""A worker's side: gradients leave for the servers while backward goes on, and weights come back."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.strategies.kept import Kept, Saved
from paceline.strategies.server.serve import bytes_of
from paceline.strategies.server.shards import Chunk, Held, Shard, Slice
from paceline.strategies.server.wire import Connection, Header, Kind, WireError

if TYPE_CHECKING:
    from torch import nn

# torch's own optimizers whose update of an element depends on that element's history alone. Others are given whole
# tensors.
ELEMENTWISE = frozenset({"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta",
                         "ASGD"})


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether rows of a tensor can be updated without the others."""
    kind = type(optimizer)
    return kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim.")


def held(parameters: Mapping[str, nn.Parameter]) -> list[Held]:
    """Parameters as they are dealt out to servers."""
    return [Held(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.element_size())
            for name, p in parameters.items()]


def rows(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    """A slice's rows of a whole tensor."""
    return tensor[part.start:part.stop] if part.shape else tensor


class Link:
    """A worker's connection to one server: a thread that sends gradients and one that receives weights."""

    def __init__(self, connection: Connection, shard: Shard, parameters: Mapping[str, nn.Parameter], *, worker: int,
                 incarnation: int) -> None:
        self.connection, self.shard, self.worker, self.incarnation = connection, shard, worker, incarnation
        self.parameters = parameters
        self.outbox: queue.SimpleQueue[tuple[Header, list[torch.Tensor]] | None] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.error: WireError | None = None
        self.version, self.missing = -1, 0
        for work in (self._send, self._receive):
            threading.Thread(target=self._guarded, args=(work,), name="paceline-link", daemon=True).start()

    def push(self, update: int, number: int, parts: list[torch.Tensor]) -> None:
        """Send a chunk when the link is free. The tensors must not change until then."""
        chunk = self.shard.chunks[number]
        self.outbox.put((Header(Kind.PUSH, chunk.num_bytes, chunk.dtype, self.worker, self.incarnation, update, number),
                         parts))

    def ask(self, version: int) -> None:
        """Ask for weights with at least so many updates; `wait` returns when they are here."""
        with self.changed:
            self.missing = len(self.shard.chunks)
        self.outbox.put((Header(Kind.PULL, worker=self.worker, incarnation=self.incarnation, step=version), []))

    def wait(self) -> int:
        """Wait for the weights that were asked for. Returns their version."""
        with self.changed:
            self.changed.wait_for(lambda: self.error is not None or self.missing == 0)
            if self.error is not None:
                raise self.error
            return self.version

    def close(self) -> None:
        """Send what is left, then leave."""
        self.outbox.put(None)

    def _guarded(self, work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except WireError as error:
            with self.changed:
                self.error = self.error or error
                self.changed.notify_all()

    def _send(self) -> None:
        while (found := self.outbox.get()) is not None:
            header, parts = found
            self.connection.send(header, *map(bytes_of, parts))
        self.connection.close()

    def _receive(self) -> None:
        scratch = bytearray(max(chunk.num_bytes for chunk in self.shard.chunks))
        while True:
            header = self.connection.receive()
            if header.kind != Kind.WEIGHTS or header.chunk >= len(self.shard.chunks):
                raise WireError(f"a server sent {header.kind.name} {header.chunk} to a worker")
            chunk = self.shard.chunks[header.chunk]
            self.connection.checked(header, chunk.num_bytes, chunk.num_bytes)
            self._read(chunk, memoryview(scratch)[:chunk.num_bytes])
            with self.changed:
                self.missing -= 1
                self.version = header.step
                self.changed.notify_all()

    def _read(self, chunk: Chunk, scratch: memoryview) -> None:
        """Into the parameters' own memory where it is plain, else through a copy."""
        targets = [self._target(span.slice, span.start, span.stop) for span in chunk.spans]
        if all(target is not None for target in targets):
            for target in targets:
                self.connection.read_into(bytes_of(target))  # type: ignore[arg-type]
            return
        self.connection.read_into(scratch)
        elements = torch.frombuffer(scratch, dtype=getattr(torch, chunk.dtype))
        at = 0
        for span in chunk.spans:
            part = self.shard.slices[span.slice]
            whole = self.parameters[part.name].data
            row = part.first_element
            flat = torch.arange(row + span.start, row + span.stop, device=whole.device)
            values = elements[at:at + span.stop - span.start].to(whole.device)
            # An index for each dim: it writes in place whatever the strides.
            whole[torch.unravel_index(flat, whole.shape) if whole.ndim else ...] = values if whole.ndim else values[0]
            at += span.stop - span.start

    def _target(self, number: int, start: int, stop: int) -> torch.Tensor | None:
        part = self.shard.slices[number]
        whole = self.parameters[part.name].data
        if whole.device.type != "cpu" or not whole.is_contiguous():
            return None
        return whole.view(-1)[part.first_element + start:part.first_element + stop]


class Pusher:
    """Sends each chunk of the gradient as soon as backward has made all of it; see `Synchroniser`.

    A gradient that never comes (an unused parameter) is sent as zeros.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], links: Sequence[Link]) -> None:
        self.parameters, self.links = parameters, links
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
        self.arrived: set[str] = set()
        self.missing: dict[tuple[int, int], int] = {}
        self.armed = False
        for p in parameters.values():
            p.register_post_accumulate_grad_hook(self._arrived)

    def begin(self, *, last: bool) -> None:
        if not self.missing:
            self.missing, self.arrived = dict(self.needs), set()
        self.armed = last

    def unused(self) -> set[str]:
        return {name for name, p in self.parameters.items() if p.grad is None}

    def finish(self) -> None:
        """What backward did not reach leaves too; all of it is on its way when this returns."""
        self.armed = False
        for server, number in [place for place, count in self.missing.items() if count]:
            self._push(server, number)
        self.missing = {}

    @property
    def sent_bytes(self) -> float:
        """What this worker has sent to servers so far."""
        return float(sum(link.connection.sent_bytes for link in self.links))

    def kept(self) -> Iterable[Kept]:
        """Servers keep the state."""
        return ()

    def restore(self, saved: Saved) -> list[str]:
        return []

    def _arrived(self, parameter: torch.Tensor) -> None:
        name = self.names[parameter]  # type: ignore[index]
        if not self.armed or name in self.arrived:
            return
        self.arrived.add(name)
        for place in self.waiting[name]:
            self.missing[place] -= 1
            if not self.missing[place]:
                self._push(*place)

    def _push(self, server: int, number: int) -> None:
        link = self.links[server]
        parts = []
        for span in link.shard.chunks[number].spans:
            part = link.shard.slices[span.slice]
            parameter = self.parameters[part.name]
            gradient = parameter.grad
            if gradient is None:
                parts.append(torch.zeros(span.stop - span.start, dtype=parameter.dtype))
            else:
                flat = gradient.detach().to("cpu").contiguous().view(-1)
                parts.append(flat[part.first_element + span.start:part.first_element + span.stop])
        link.push(self.update, number, parts)


def pull(links: Sequence[Link], version: int) -> tuple[int, float]:
    """Fetch weights with at least so many updates from all servers.

    Returns:
        How many they have at least, and the seconds it took.
    """
    began_s = time.perf_counter()
    for link in links:
        link.ask(version)
    return min(link.wait() for link in links), time.perf_counter() - began_s
