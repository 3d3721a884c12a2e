"""The newest copies that the hosts of a run hold together, for ranks that start again.

Each host has the copies of its own ranks, and maybe those of its neighbour
(`launch/hosts/host_copies.py`). The ranks of a host copy all that they hold, so copies of one host
are whole by themselves, and are those of the run where ranks on each host hold all parts. Every
rank learns what each host has, rank 0 chooses the step, and each reads what its own host has from
there and the rest from others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.errors import PeerLost
from paceline.base.logs import logger
from paceline.base.waiting import waiting
from paceline.checkpoint.dtypes import DTYPES
from paceline.checkpoint.pieces import Region
from paceline.checkpoint.read import Checkpoint, StoredPiece, TensorEntry, newest_saved_step
from paceline.launch.hosts.copy_service import CopyAddress, CopyReader
from paceline.launch.hosts.host_copies import HostCopies
from paceline.launch.process.context import RankContext
from paceline.runs.folder import JOURNAL
from paceline.runs.journal import last_step
from paceline.strategies.mesh import hosts_of_parts
from paceline.training.parts.drift import FINGERPRINTS, who_differs
from paceline.training.parts.memory_checkpoint import read_part

if TYPE_CHECKING:
    from paceline.training.state import StateOwner

_INDEX_BYTES = 2**28  # of an index, at most


def part_of(stepper: StateOwner) -> tuple[int, int]:
    """Which part of the run's state this rank holds, and how many there are. Ranks with the same part hold the same."""
    mesh = stepper.mesh
    if stepper.step_sync.has_own_steps or any(kept.replica for kept in stepper.kept()):
        return mesh.rank, mesh.world_size
    return mesh.part, mesh.world_size // mesh.num_copies


def origin_of(stepper: StateOwner, context: RankContext) -> dict[str, Any]:
    """What copies say of the rank that makes them."""
    part, num_parts = part_of(stepper)
    return {
        "attempt": context.attempt,
        "rank": context.rank,
        "host_ranks": context.local_world_size,
        "part": part,
        "num_parts": num_parts,
    }


def needs_neighbour(stepper: StateOwner, context: RankContext) -> bool:
    """Whether the run can't go on without the copies of some host, as only its ranks hold some part. Alike on all
    ranks."""
    mesh, num_local = stepper.mesh, context.local_world_size
    if mesh.world_size == num_local:
        return False
    if part_of(stepper)[1] == mesh.world_size:
        return True
    return any(len(of_part) == 1 for of_part in hosts_of_parts(mesh, num_local).values())


@dataclass(frozen=True)
class _RankCopy:
    """A copy of a rank in a slot of a host. prints: of what it held that replicas should hold alike, by replicas."""

    slot: int
    step: int
    attempt: str
    rank: int
    host_ranks: int
    part: int
    num_parts: int
    prints: dict[str, str]

    @property
    def host(self) -> int:
        return self.rank // self.host_ranks


@dataclass(frozen=True)
class _RestartPoint:
    """What ranks may go on from."""

    step: int
    attempt: str


@dataclass(frozen=True)
class _HostMemory:
    """What a host of this start has, and where it serves that. copies: of its own ranks and of others."""

    address: CopyAddress
    copies: tuple[_RankCopy, ...]

    def whole(self, point: _RestartPoint) -> Iterator[list[_RankCopy]]:
        """What it has of that of all ranks of a host."""
        hosts: dict[int, dict[int, _RankCopy]] = {}
        for copy in self.copies:
            if (copy.attempt, copy.step) == (point.attempt, point.step):
                hosts.setdefault(copy.host, {}).setdefault(copy.rank, copy)
        for of_host in hosts.values():
            if len(of_host) == next(iter(of_host.values())).host_ranks:
                yield [of_host[rank] for rank in sorted(of_host)]


def _own_memory(copies: HostCopies) -> _HostMemory:
    rank_copies = []
    for slot in range(copies.memory.num_ranks):
        for step in copies.memory.steps(slot):
            index = json.loads(copies.memory.index(slot, step))
            prints = {}
            for name, entry in index["tensors"].items():
                if name.startswith(FINGERPRINTS):
                    ((offset, _, shape),) = entry["pieces"]
                    row = bytearray(8 * shape[1])
                    copies.memory.read_into(slot, step, offset, memoryview(row))
                    prints[name] = hashlib.sha256(row).hexdigest()[:16]
            rank_copies.append(_RankCopy(slot, step, prints=prints, **index["origin"]))
    return _HostMemory(copies.address, tuple(rank_copies))


def _all_memory(context: RankContext, copies: HostCopies) -> list[_HostMemory]:
    """What each host has, by its number in this start. Collective."""
    store, num_local = context.store, context.local_world_size
    assert store is not None
    keys = [f"copies/{host}" for host in range(context.world_size // num_local)]
    if context.slot == 0:
        host_memory = _own_memory(copies)
        store.set(keys[context.rank // num_local], json.dumps(asdict(host_memory)))
    with waiting:
        documents = [json.loads(text) for text in store.multi_get(keys)]
    return [
        _HostMemory(
            CopyAddress(**document["address"]),
            tuple(_RankCopy(**entry) for entry in document["copies"]),
        )
        for document in documents
    ]


@dataclass(frozen=True)
class HostsCopy(Checkpoint):
    """Copies of several hosts' ranks, to be read as a checkpoint is."""

    memory: _Memory | None = None

    def _open(self, file: str) -> Any:
        assert self.memory is not None
        host, slot = map(int, file.split(":"))
        return _SlotCopy(self.memory, host, slot, self.step)

    def close(self) -> None:
        """Nothing more is read."""
        assert self.memory is not None
        self.memory.close()


@dataclass(frozen=True, slots=True)
class _SlotCopy:
    memory: _Memory
    host: int
    slot: int
    step: int

    def read(self, piece: StoredPiece, dtype: torch.dtype, part: tuple[slice, ...]) -> torch.Tensor:
        return read_part(
            piece, dtype, part, partial(self.memory.read_into, self.host, self.slot, self.step)
        )


@dataclass
class _Memory:
    """The memory of all hosts, as one rank reads it: directly on its own host."""

    context: RankContext
    copies: HostCopies
    hosts: Sequence[_HostMemory]
    _readers: dict[int, CopyReader] = field(default_factory=dict)

    @property
    def own_host(self) -> int:
        return self.context.rank // self.context.local_world_size

    def read_into(self, host: int, slot: int, step: int, offset: int, target: memoryview) -> None:
        if host == self.own_host:
            self.copies.memory.read_into(slot, step, offset, target)
        else:
            self._remote(host, lambda reader: reader.read_into(slot, step, offset, target))

    def index(self, host: int, slot: int, step: int) -> dict[str, Any]:
        start, end = (
            self.copies.memory.extent(slot, step)
            if host == self.own_host
            else self._remote(host, lambda reader: reader.extent(slot, step))
        )
        if end - start > _INDEX_BYTES:
            raise PeerLost(f"host {host} sends an index of {end - start} bytes")
        text = bytearray(end - start)
        self.read_into(host, slot, step, start, memoryview(text))
        try:
            document: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise PeerLost(
                f"what host {host} sends as the index of a copy is none: {error}"
            ) from error
        return document

    def _remote(self, host: int, ask: Callable[[CopyReader], Any]) -> Any:
        """
        Raises:
            PeerLost: the host gives no answer.
        """
        address = self.hosts[host].address
        try:
            if host not in self._readers:
                self._readers[host] = CopyReader(address, timeout_s=self.context.timeout_s)
            return ask(self._readers[host])
        except OSError as error:
            lost = PeerLost(
                f"its host {address.host} does not give the copies that it has: {error}",
                rank=host * self.context.local_world_size,
            )
            lost.heard = True  # type: ignore[attr-defined]  # who sees why it is gone says more
            raise lost from error

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


def open_newest(
    context: RankContext, run_dir: Path, accept: Callable[[Checkpoint], str | None]
) -> HostsCopy | None:
    """The newest state of which hosts have whole copies that replicas held alike, if it is newer than what the run
    folder has. Rank 0 chooses for all ranks, which read what they need themselves. Collective.

    accept: says why the run can't go on from it; None if it can.
    """
    copies = context.host_copies
    assert copies is not None and context.store is not None
    store, memory = context.store, _Memory(context, copies, _all_memory(context, copies))
    if context.rank == 0:
        point = _chosen(memory, run_dir, accept)
        store.set("copy", json.dumps(point and asdict(point)))
    with waiting:
        chosen = json.loads(store.get("copy"))
    return _open(memory, _RestartPoint(**chosen)) if chosen else None


def _chosen(
    memory: _Memory, run_dir: Path, accept: Callable[[Checkpoint], str | None]
) -> _RestartPoint | None:
    """Return what ranks go on from; None if no host has copies that they can use."""
    least, most = newest_saved_step(run_dir), last_step(run_dir / JOURNAL)
    known = {
        _RestartPoint(entry.step, entry.attempt) for host in memory.hosts for entry in host.copies
    }
    for point in sorted(
        (point for point in known if point.step >= least),
        reverse=True,
        key=lambda point: (point.step, point.attempt),
    ):
        # What is not recorded may have been computed by a host that the others had given up, or be lost with one.
        why = "that step is not recorded" if point.step > most else _fault(memory, point)
        if why is None:
            why = accept(copy := _open(memory, point))
            copy.close()
        if why is None:
            return point
        logger.warning(f"the copies in memory of step {point.step} are passed over: {why}")
    return None


def _fault(memory: _Memory, point: _RestartPoint) -> str | None:
    """Why hosts do not have all of it, or not as replicas held it alike; None if they have."""
    entries = [entry for host in memory.hosts for whole in host.whole(point) for entry in whole]
    parts = {entry.part for entry in entries}
    if not entries or len(parts) < entries[0].num_parts:
        return f"hosts that are here have {len(parts)} of its {entries[0].num_parts if entries else 'many'} parts"
    rows: dict[str, dict[int, str]] = {}
    for entry in entries:
        for name, digest in entry.prints.items():
            if rows.setdefault(name, {}).setdefault(entry.rank, digest) != digest:
                return f"two hosts have copies of rank {entry.rank}'s state that differ"
    for of_replicas in rows.values():
        if len(set(of_replicas.values())) > 1:
            return f"the state {who_differs(list(of_replicas), list(of_replicas.values()))}"
    return None


def _open(memory: _Memory, point: _RestartPoint) -> HostsCopy:
    """The copies of as few hosts as have all parts: this one if it can, and those that follow it."""
    num_hosts, parts = len(memory.hosts), set[int]()
    tensors: dict[str, TensorEntry] = {}
    document: dict[str, Any] = {}
    for host in ((memory.own_host + i) % num_hosts for i in range(num_hosts)):
        for whole in memory.hosts[host].whole(point):
            if {entry.part for entry in whole} <= parts:
                continue
            parts |= {entry.part for entry in whole}
            for entry in whole:
                index = memory.index(host, entry.slot, point.step)
                document = document or index["document"] or {}
                _add(tensors, index["tensors"], f"{host}:{entry.slot}")
    return HostsCopy(Path(f"copy-{point.step}"), point.step, document, tensors, memory)


def _add(tensors: dict[str, TensorEntry], of_slot: dict[str, Any], file: str) -> None:
    """Add what a slot has of tensors, but for regions that are there already."""
    for name, entry in of_slot.items():
        if name.startswith(FINGERPRINTS):
            continue
        before = tensors[name].pieces if name in tensors else ()
        there = {piece.region for piece in before}
        new = [
            StoredPiece(file, str(offset), region)
            for offset, offsets, shape in entry["pieces"]
            if (region := Region(tuple(offsets), tuple(shape))) not in there
        ]
        tensors[name] = TensorEntry(tuple(entry["shape"]), DTYPES[entry["dtype"]], (*before, *new))


def begin(stepper: StateOwner, context: RankContext, step: int, copied: Checkpoint | None) -> None:
    """The run goes on from this step, and from these copies: let this host keep the copies of the one before it where
    that is needed. Collective."""
    copies, store = context.host_copies, context.store
    assert copies is not None and store is not None
    if context.slot == 0:
        for slot in range(copies.num_ranks, 2 * copies.num_ranks):
            copies.memory.keep(slot, until=step if copied is not None else None)
        if needs_neighbour(stepper, context):
            num_hosts = context.world_size // context.local_world_size
            host = context.rank // context.local_world_size
            store.set(f"keeps/{host}", json.dumps(asdict(copies.address)))
            with waiting:
                address = json.loads(store.get(f"keeps/{(host - 1) % num_hosts}"))
            copies.keep_for(CopyAddress(**address))
