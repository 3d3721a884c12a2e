"""The newest state that copies in memory hold together, for ranks that start again.

A run on this machine has one host, whose memory all ranks share. On several, each host has the
copies of its own ranks, and maybe those of its neighbour (`launch/hosts/host_copies.py`). The ranks
of a host copy all that they hold, so copies of one host are whole by themselves, and are those of
the run where ranks on each host hold all parts. Every rank learns what each host has, rank 0 chooses
the step, and each reads what its own host has from there and the rest from others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.errors import CheckpointError
from paceline.base.logs import logger
from paceline.checkpoint.index import StoredPiece, entries_of, file_of, merged
from paceline.checkpoint.read import Checkpoint, newest_saved_step
from paceline.launch.hosts.copy_service import CopyAddress, CopyReader, HostMemory, index_of
from paceline.launch.process.context import RankContext
from paceline.launch.process.memory_store import StateCopies
from paceline.runs.folder import JOURNAL
from paceline.runs.journal import last_step
from paceline.strategies.mesh import hosts_of_parts
from paceline.training.parts.drift import who_differs

if TYPE_CHECKING:
    from paceline.training.state import StateOwner


_Point = tuple[int, str]  # what ranks may go on from: the step, and the attempt that made it


@dataclass(frozen=True)
class CopyStore:
    """Ranks' copies of a step. slots: where the file of each rank is."""

    step: int
    slots: dict[str, tuple[HostMemory, int]]

    def read_into(
        self, piece: StoredPiece, dtype: torch.dtype, start: int, target: memoryview
    ) -> None:
        """See `Store`."""
        memory, slot = self.slots[piece.file]
        memory.read_into(slot, self.step, int(piece.key) + start, target)


def open_copies(step: int, slots: Iterable[tuple[HostMemory, int]]) -> Checkpoint:
    """Open what these slots hold of a step, which together is the run's state.

    Raises:
        CheckpointError: it is not the whole.
    """
    store, parts, document = CopyStore(step, {}), [], dict[str, Any]()
    for memory, slot in slots:
        index = _index(memory, slot, step)
        document = document or json.loads(index["document"]) or {}
        store.slots[file_of(index["origin"]["rank"])] = memory, slot
        parts.append(index["tensors"])
    tensors = entries_of(merged(parts), store.slots)
    return Checkpoint(Path(f"copy-{step}"), step, document, tensors, store)


def _index(memory: HostMemory, slot: int, step: int) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads(index_of(memory, slot, step))
    except ValueError as error:
        raise CheckpointError(f"the index of a copy of step {step} is none: {error}") from error
    return index


def part_of(stepper: StateOwner) -> tuple[int, int]:
    """Which part of the run's state this rank holds, and how many there are. Ranks with the same part hold the same."""
    mesh = stepper.mesh
    if stepper.step_sync.has_own_steps or any(kept.replica for kept in stepper.kept()):
        return mesh.rank, mesh.world_size
    return mesh.part, mesh.world_size // mesh.num_copies


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
    prints: dict[str, str]
    attempt: str
    rank: int
    host_ranks: int
    part: int
    num_parts: int

    @property
    def point(self) -> _Point:
        return self.step, self.attempt


@dataclass(frozen=True)
class _HostCopies:
    """What a host of this start has, of its own ranks and of others. memory: gives access to it."""

    memory: Callable[[], HostMemory]
    copies: list[_RankCopy]

    def whole(self, point: _Point) -> Iterator[list[_RankCopy]]:
        """What it has of that of all ranks of a host."""
        hosts: dict[int, dict[int, _RankCopy]] = {}
        for copy in self.copies:
            if copy.point == point:
                of_host = hosts.setdefault(copy.rank // copy.host_ranks, {})
                of_host.setdefault(copy.rank, copy)
        for of_host in hosts.values():
            if len(of_host) == next(iter(of_host.values())).host_ranks:
                yield [of_host[rank] for rank in sorted(of_host)]


def _all_hosts(context: RankContext, memory: StateCopies) -> list[_HostCopies]:
    """What each host has, this one first, and then those that follow it. Collective."""
    own, num_local = context.host_copies, context.local_world_size
    num_hosts, this_host = context.world_size // num_local, context.rank // num_local
    copies = [
        _RankCopy(slot, step, **_index(memory, slot, step)["origin"])
        for slot in range(memory.num_ranks if context.slot == 0 else 0)
        for step in memory.steps(slot)
    ]
    if context.store is None:
        return [_HostCopies(lambda: memory, copies)]
    if context.slot == 0:
        document = {"address": own and asdict(own.address), "copies": list(map(asdict, copies))}
        context.store.set(f"copies/{this_host}", json.dumps(document))
    hosts = list[_HostCopies]()
    for host in ((this_host + i) % num_hosts for i in range(num_hosts)):
        document = json.loads(context.hear(f"copies/{host}", "restore"))
        copies = [_RankCopy(**copy) for copy in document["copies"]]
        hosts.append(
            _HostCopies(
                partial(
                    CopyReader,
                    CopyAddress(**document["address"]),
                    timeout_s=context.timeout_s,
                    rank=host * num_local,
                )
                if hosts
                else lambda: memory,
                copies,
            )
        )
    return hosts


def open_newest(
    context: RankContext,
    run_dir: Path,
    accept: Callable[[Checkpoint], str | None],
    *,
    before: Callable[[int], int] = lambda step: step,
) -> Checkpoint | None:
    """Return the newest state of which hosts have whole copies that replicas held alike, if it is newer than what the
    run folder has. Rank 0 chooses for all ranks, which read what they need themselves. Collective.

    Args:
        accept: Says why the run can't go on from it; None if it can.
        before: What copies count up to the end of a step: updates, if not steps.
    """
    if context.copies is None or (context.host_copies is None and context.num_starts == 1):
        return None
    hosts = _all_hosts(context, context.copies)
    if context.rank == 0:
        least = before(newest_saved_step(run_dir))
        # What is not recorded may have been computed by a host that the others had given up, or be lost with one.
        most = math.inf if context.host_copies is None else last_step(run_dir / JOURNAL)
        point = _chosen(hosts, accept, least=least, most=most)
        if context.store is not None:
            context.store.set("copy", json.dumps(point))
    else:
        point = json.loads(context.hear("copy", "restore"))
    return _open(hosts, (point[0], point[1])) if point is not None else None


def _chosen(
    hosts: Sequence[_HostCopies],
    accept: Callable[[Checkpoint], str | None],
    *,
    least: int,
    most: float,
) -> _Point | None:
    """Return what ranks go on from; None if no host has copies that they can use."""
    for point in sorted({copy.point for host in hosts for copy in host.copies}, reverse=True):
        whole = [copy for host in hosts for of_host in host.whole(point) for copy in of_host]
        if point[0] < least or not whole:
            continue
        why = "that step is not recorded" if point[0] > most else _fault(whole)
        try:
            why = why or accept(_open(hosts, point))
        except CheckpointError as error:
            why = error.args[0]
        if why is None:
            return point
        logger.warning(f"the copies in memory of step {point[0]} are passed over: {why}")
    return None


def _fault(copies: Sequence[_RankCopy]) -> str | None:
    """Why these are not all of the run's state, or not as replicas held it alike; None if they are."""
    num_found, num_parts = len({copy.part for copy in copies}), copies[0].num_parts
    if num_found < num_parts:
        return f"hosts that are here have {num_found} of its {num_parts} parts"
    rows: dict[str, dict[int, str]] = {}
    for copy in copies:
        for name, digest in copy.prints.items():
            if rows.setdefault(name, {}).setdefault(copy.rank, digest) != digest:
                return f"two hosts have copies of rank {copy.rank}'s state that differ"
    for of_replicas in rows.values():
        if len(set(of_replicas.values())) > 1:
            return f"the state {who_differs(list(of_replicas), list(of_replicas.values()))}"
    return None


def _open(hosts: Sequence[_HostCopies], point: _Point) -> Checkpoint:
    """Open the copies of as few hosts as have all parts: of the first ones that have another one."""
    parts, slots = set[int](), list[tuple[HostMemory, int]]()
    for host in hosts:
        for whole in host.whole(point):
            of_host = {copy.part for copy in whole}
            if not of_host <= parts:
                parts |= of_host
                memory = host.memory()
                slots += [(memory, copy.slot) for copy in whole]
    return open_copies(point[0], slots)
