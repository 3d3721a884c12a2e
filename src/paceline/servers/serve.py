"""What a server holds and does: gradients come in part by part, are summed, and weights go out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.servers.clock import LEASES
from paceline.servers.shard_memory import ShardMemory
from paceline.servers.wire import (
    Connection,
    Header,
    Kind,
    Peer,
    Role,
    Uplink,
    WireError,
)
from paceline.strategies.server.shards import Shard

_NORMED = 2**17  # elements at a time
# Updates that one worker may have begun to send and that are not made. It has weights with every update that was made
# before its last lease, so those are its leases and the one before; the rest is for servers without chunks.
_BEGUN = 4 * LEASES


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

    def leave(self, peer: Peer) -> None:
        """A worker is gone: what it sent in part will never be whole."""
        with self.changed:
            self.connections.pop(peer, None)
            for update, gathering in list(self.gatherings.items()):
                if gathering.sender == peer and self.terms.num_parts == 1 and gathering.unfinished:
                    self._forget(update)

    def expected(self, header: Header, peer: Peer, part: int, number: int) -> _Gathering | None:
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

    def arrived(self, update: int, gathering: _Gathering, number: int) -> None:
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


def _squares(flat: torch.Tensor) -> float:
    """Their sum, in float64. Part by part: a copy of all in float64 takes eight times as long as what fits a cache."""
    return sum(
        float(torch.linalg.vector_norm(part, dtype=_wide(part))) ** 2
        for part in flat.split(_NORMED)
    )


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
