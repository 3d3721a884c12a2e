"""Hosts that are left hold the run's state together, or the run goes on from a checkpoint and says why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.base.errors import PeerLost
from paceline.base.logs import logger
from paceline.checkpoint.pieces import Region, TensorPiece
from paceline.launch.hosts.copy_service import CopyReader, index_of
from paceline.launch.hosts.host_copies import HostCopies
from paceline.strategies.mesh import Mesh
from paceline.training.parts.copied_state import (
    needs_neighbour,
    open_newest,
    part_of,
)
from paceline.training.parts.memory_checkpoint import Copier

WHOLE = torch.arange(24.0).reshape(6, 4)
_opened: list[Any] = []


@pytest.fixture
def hosts() -> Iterator[list[HostCopies]]:
    """Three hosts with one rank each."""
    made = [HostCopies(1) for _ in range(3)]
    for host in made:
        host.serve("127.0.0.1")
    yield made
    _opened.clear()
    for host in made:
        host.close()
        host.memory.close()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lines.append)
    return lines


def stepper_of(axes: dict[str, int], rank: int, *, has_own_steps: bool = False) -> Any:
    return SimpleNamespace(
        mesh=Mesh(axes, rank), kept=list, step_sync=SimpleNamespace(has_own_steps=has_own_steps)
    )


def context_of(
    host: HostCopies, rank: int, world_size: int, store: Any, attempt: str = "first"
) -> Any:
    return SimpleNamespace(
        rank=rank,
        slot=0,
        world_size=world_size,
        local_world_size=1,
        attempt=attempt,
        store=store,
        copies=host.memory,
        host_copies=host,
        timeout_s=5.0,
        hear=lambda key, phase: store.get(key),
    )


def copy(
    host: HostCopies,
    axes: dict[str, int],
    rank: int,
    step: int,
    *,
    slot: int = 0,
    flip: bool = False,
) -> None:
    """What a rank copies of a tensor that shard cuts, with the step in it. slot: 1 for that of the neighbour."""
    num_parts = axes.get("shard", 1)
    rows = len(WHOLE) // num_parts
    first = rank % num_parts * rows
    stepper = stepper_of(axes, rank)
    context = context_of(host, rank, stepper.mesh.world_size, None)
    context.slot = slot
    replicas = ",".join(map(str, stepper.mesh.ranks_along("data"))) if "data" in axes else "0"
    row = torch.tensor([7 + int(flip), 8])
    pieces = [
        TensorPiece("parameters/w", (6, 4), (first, 0), WHOLE[first : first + rows] + step),
        TensorPiece(f"fingerprints/{replicas}", (2,), (0,), row),
    ]
    Copier(context, host.memory, 1, part_of(stepper)).copy(step, pieces, {"step": step})


def newest(hosts: list[HostCopies], run: Path, *, rank: int = 0, recorded: int = 100) -> Any:
    """What a rank goes on from with these hosts."""
    (run / "journal.jsonl").write_text(
        f'{{"launch":1,"step":{recorded},"epoch":0,"start":0,"count":1}}\n{{"torn'
    )
    store = dist.HashStore()
    with ThreadPoolExecutor() as ranks:
        opened = list(
            ranks.map(
                lambda number: open_newest(
                    context_of(hosts[number], number, len(hosts), store), run, lambda copied: None
                ),
                range(len(hosts)),
            )
        )
    _opened.extend(copied for copied in opened if copied is not None)
    return opened[rank]


def remote(copied: Any) -> list[Any]:
    """Other hosts from which copies are read."""
    return [memory for memory, _ in copied.store.slots.values() if isinstance(memory, CopyReader)]


def test_a_replica_reads_its_own_host(hosts: list[HostCopies], tmp_path: Path, warnings: list[str]):
    """The newest step that is recorded, though the last host has a newer copy."""
    for rank, host in enumerate(hosts):
        copy(host, {"data": 3}, rank, 4)
    copy(hosts[2], {"data": 3}, 2, 5)
    copied = newest(hosts, tmp_path, rank=1, recorded=4)
    assert (
        copied.step == 4
        and copied.document == {"step": 4}
        and torch.equal(copied.read("parameters/w"), WHOLE + 4)
    )
    assert not remote(copied) and "fingerprints/0,1,2" not in copied.tensors
    assert warnings == ["the copies in memory of step 5 are passed over: that step is not recorded"]


def test_a_new_host_reads_what_another_one_has(hosts: list[HostCopies], tmp_path: Path):
    for rank in range(2):
        copy(hosts[rank], {"data": 2}, rank, 4)
    copied = newest(hosts, tmp_path, rank=2)
    assert torch.equal(copied.read("parameters/w", Region((1, 1), (3, 2))), WHOLE[1:4, 1:3] + 4)
    assert [host._rank for host in remote(copied)] == [0]


def test_a_lost_host_is_read_from_its_neighbour(
    hosts: list[HostCopies], tmp_path: Path, warnings: list[str]
):
    """The step that all have; what the two that are left hold of a later one is not the whole."""
    for rank, host in enumerate(hosts):
        copy(host, {"shard": 3}, rank, 4)
        copy(host, {"shard": 3}, (rank - 1) % 3, 4, slot=1)
        copy(host, {"shard": 3}, rank, 6)
    for rank in range(2):
        copied = newest(hosts[:2], tmp_path, rank=rank)
        assert copied.step == 4 and torch.equal(copied.read("parameters/w"), WHOLE + 4)
    assert (
        warnings
        == [
            "the copies in memory of step 6 are passed over: hosts that are here have 2 of its 3 parts"
        ]
        * 2
    )
    assert newest(hosts, tmp_path).step == 6


def test_parts_of_two_starts_are_not_put_together(
    hosts: list[HostCopies], tmp_path: Path, warnings: list[str]
):
    for rank, host in enumerate(hosts[:2]):
        copy(host, {"shard": 2}, rank, 4)
    index = json.loads(index_of(hosts[1].memory, 0, 4))
    index["origin"]["attempt"] = "second"
    data = bytearray(48)
    hosts[1].memory.read_into(0, 4, 0, memoryview(data))
    hosts[1].memory.keep(0, until=None)
    hosts[1].memory.write(0, 4, [memoryview(data)], json.dumps(index).encode())
    assert newest(hosts[:2], tmp_path) is None and len(warnings) == 2


def test_copies_of_a_rank_that_differ_are_passed_over(
    hosts: list[HostCopies], tmp_path: Path, warnings: list[str]
):
    """Its own and that of its neighbour, which is read where the rank's host is lost."""
    for rank, host in enumerate(hosts):
        copy(host, {"shard": 3}, rank, 4)
        copy(host, {"shard": 3}, (rank - 1) % 3, 4, slot=1, flip=rank == 2)
    assert newest(hosts, tmp_path) is None
    assert warnings == [
        "the copies in memory of step 4 are passed over: "
        "two hosts have copies of rank 1's state that differ"
    ]


def test_replicas_that_differ_are_passed_over(
    hosts: list[HostCopies], tmp_path: Path, warnings: list[str]
):
    for rank, host in enumerate(hosts):
        copy(host, {"data": 3}, rank, 4, flip=rank == 1)
    assert newest(hosts, tmp_path) is None
    assert warnings == [
        "the copies in memory of step 4 are passed over: "
        "the state on rank 1 is not what the others hold"
    ]


def test_copies_with_a_hole_are_passed_over(
    hosts: list[HostCopies], tmp_path: Path, warnings: list[str]
):
    """The index is checked as that of a checkpoint is, and the copies before are taken."""
    copy(hosts[0], {"data": 1}, 0, 4)
    context = context_of(hosts[0], 0, 1, None)
    pieces = [TensorPiece("parameters/w", (6, 4), (0, 0), WHOLE[:3])]
    Copier(context, hosts[0].memory, 1, (0, 1)).copy(5, pieces, {"step": 5})
    assert newest(hosts[:1], tmp_path).step == 4
    assert warnings == [
        "the copies in memory of step 5 are passed over: no rank saves the part of 'parameters/w' at (3, 0) "
        "of shape (3, 4); the whole has shape (6, 4)"
    ]


def test_older_copies_than_the_checkpoint_do_not_count(hosts: list[HostCopies], tmp_path: Path):
    (tmp_path / "checkpoints" / "step-5").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-5" / "COMMIT").touch()
    for step in (4, 5):
        copy(hosts[0], {"data": 1}, 0, step)
    assert newest(hosts[:1], tmp_path).step == 5
    hosts[0].memory.keep(0, until=4)
    assert newest(hosts[:1], tmp_path) is None


def test_a_host_that_is_lost_meanwhile_is_a_lost_rank(hosts: list[HostCopies], tmp_path: Path):
    for rank, host in enumerate(hosts):
        copy(host, {"shard": 3}, rank, 4)
    copied = newest(hosts, tmp_path)
    for host in remote(copied):
        host._sock.close()
    with pytest.raises(PeerLost, match="does not give the copies") as error:
        copied.read("parameters/w")
    assert error.value.rank in (1, 2)


def test_what_was_sent_stays_until_the_next_is(hosts: list[HostCopies]):
    """Copies between those that are sent are newer, and ranks that go on from one of them send it at once."""
    host, store = hosts[0], dist.HashStore()
    store.set("keeps/2", json.dumps(asdict(hosts[2].address)))

    def copier() -> Copier:
        return Copier(context_of(host, 0, 3, store), host.memory, 1, (0, 1), host)

    def copy_after(steps: range) -> None:
        for step in steps:
            made.copy(step, [], {})

    made = copier()
    made.begin(0, is_copied=False)
    copy_after(range(1, 2))
    made.send(1)
    assert host.offered() == 1 and made.next_send == 2
    made.note_sent()
    copy_after(range(2, 5))
    assert set(host.memory.steps(0)) == {1, 3, 4} and (made.sent, host.sent_step) == (1, 1)
    made.send(4)
    copy_after(range(5, 8))
    assert set(host.memory.steps(0)) == {1, 4, 7} and host.offered() == 4
    host.rest()
    assert host.offered() == -1
    made = copier()
    made.begin(7, is_copied=True)
    assert (made.sent, made.sending, host.offered()) == (1, 7, 7)
    copy_after(range(8, 10))
    assert set(host.memory.steps(0)) == {1, 7, 9}
    made.note_sent()
    made.begin(7, is_copied=True)
    assert (made.sent, made.sending) == (7, -1) and set(host.memory.steps(0)) == {1, 7}
    made.begin(5, is_copied=False)
    assert (made.sent, host.sent_step) == (-1, -1) and not host.memory.steps(0)


@pytest.mark.parametrize(
    ("axes", "host_ranks", "has_own_steps", "expected"),
    [
        ({"data": 2}, 1, False, False),
        ({"shard": 2}, 1, False, True),
        ({"shard": 2}, 2, False, False),
        ({"data": 2, "shard": 2}, 2, False, False),
        ({"data": 2, "shard": 2}, 1, False, False),
        ({"pipeline": 2, "data": 2}, 2, False, True),
        ({"data": 2}, 1, True, True),
    ],
)
def test_where_a_neighbour_is_needed(
    axes: dict[str, int], host_ranks: int, has_own_steps: bool, expected: bool
):
    """Where only one host has some part."""
    for rank in range(Mesh(axes, 0).world_size):
        context: Any = SimpleNamespace(rank=rank, local_world_size=host_ranks)
        assert (
            needs_neighbour(stepper_of(axes, rank, has_own_steps=has_own_steps), context)
            == expected
        )
