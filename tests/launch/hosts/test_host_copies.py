"""A host takes over the copies of the one before it, and nobody else reads or delays them."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from conditions import until

from paceline.base.errors import PeerLost
from paceline.launch.hosts import host_copies
from paceline.launch.hosts.copy_service import CopyAddress, CopyReader
from paceline.launch.hosts.host_copies import HostCopies


@pytest.fixture
def hosts() -> Iterator[list[HostCopies]]:
    """Two hosts with two ranks each."""
    made = [HostCopies(2) for _ in range(2)]
    for host in made:
        host.serve("127.0.0.1")
    yield made
    for host in made:
        host.close()
        host.memory.close()


def copy(host: HostCopies, step: int, size: int = 1000) -> None:
    for rank in range(2):
        host.memory.write(
            rank, step, [memoryview(bytes([step, rank]) * size)], b'{"rank": %d}' % rank
        )
    host.offer(step)


def kept(host: HostCopies, step: int, rank: int, size: int = 1000) -> bool:
    """Whether a host has what another one's rank copied."""
    slot, content = 2 + rank, bytes([step, rank]) * size + b'{"rank": %d}' % rank
    if step not in host.memory.steps(slot):
        return False
    start, end = host.memory.extent(slot, step)
    buffer = bytearray(end)
    host.memory.read_into(slot, step, 0, memoryview(buffer))
    return start == 2 * size and buffer == content


def test_a_host_takes_over_copies_of_the_one_before_it(
    hosts: list[HostCopies], monkeypatch: pytest.MonkeyPatch
):
    """In pieces, as all its ranks have made them, and it says so."""
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 700)
    first, second = hosts
    second.keep_for(first.address)
    first.memory.write(0, 3, [memoryview(b"alone")], b"{}")
    first.offer(3)  # the other rank has not made its own yet
    time.sleep(0.3)
    assert first.taken_step == -1 and second.memory.newest([2, 3]) is None
    for step in (4, 7, 8):
        copy(first, step)
        until(lambda step=step: first.taken_step == step)
        assert all(kept(second, step, rank) for rank in range(2)) and (first.took_s > 0) == (
            step == 8
        )
    assert set(second.memory.steps(2)) == {7, 8} and second.taken_step == -1
    second.give_back_kept()
    assert second.memory.newest([2, 3]) is None


def test_a_host_that_is_lost_while_it_is_copied_leaves_its_last_copies(
    hosts: list[HostCopies], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_copies, "PIECE_BYTES", 700)
    first, second = hosts
    second.keep_for(first.address)
    for step in (1, 2):
        copy(first, step)
        until(lambda step=step: first.taken_step == step)
    tears: list[int] = []
    monkeypatch.setattr(second.memory, "write", half_of(second.memory.write, tears))
    copy(first, 3)
    until(lambda: tears)
    assert first.taken_step == 2 and set(second.memory.steps(2)) == {2}
    assert all(kept(second, 2, rank) for rank in range(2))


def test_copies_that_were_sent_stay(hosts: list[HostCopies]):
    """Beside those that are being sent, and newer ones; without any, two slots are used."""
    memory = hosts[0].memory
    for step, keep, expected in (
        (1, (), {1}),
        (2, (), {1, 2}),
        (3, (), {2, 3}),
        (4, (2,), {2, 3, 4}),
        (5, (2, 4), {2, 4, 5}),
        (6, (2, 4), {2, 4, 6}),
        (7, (4,), {4, 6, 7}),
    ):
        memory.write(0, step, [memoryview(b"1")], b"{}", keep=keep)
        assert set(memory.steps(0)) == expected


def test_a_copy_that_is_written_over_while_it_is_read(
    hosts: list[HostCopies], monkeypatch: pytest.MonkeyPatch
):
    """Who reads it is told, and the host goes on without a word."""
    memory, raised = hosts[0].memory, []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    copy(hosts[0], 1)
    reader = CopyReader(hosts[0].address, timeout_s=30.0)
    read = memory.read_into

    def read_too_late(rank: int, step: int, offset: int, target: memoryview) -> None:
        memory.keep(rank, until=None)
        read(rank, step, offset, target)

    monkeypatch.setattr(memory, "read_into", read_too_late)
    with closing(reader), pytest.raises(PeerLost, match="has the copy of step 1 no more"):
        reader.read_into(0, 1, 0, memoryview(bytearray(10)))
    assert not raised


def half_of(write: Callable[..., None], tears: list[int]) -> Callable[..., None]:
    """Its peer is gone after the first piece."""

    def torn(rank: int, step: int, parts: Iterator[memoryview], index: bytes) -> None:
        def first_part() -> Iterator[memoryview]:
            yield next(parts)
            raise PeerLost("the host is lost")

        try:
            write(rank, step, first_part(), index)
        finally:
            tears.append(step)

    return torn


def test_without_memory_the_host_is_told(hosts: list[HostCopies], monkeypatch: pytest.MonkeyPatch):
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "no memory")

    first, second = hosts
    monkeypatch.setattr(second.memory, "write", full)
    second.keep_for(first.address)
    copy(first, 1)
    until(lambda: first.has_failed)


def test_what_an_earlier_start_left_is_not_taken_over(hosts: list[HostCopies]):
    """It stays as it is until ranks offer something, for whoever reads it meanwhile."""
    first, second = hosts
    copy(first, 5)
    for host in hosts:
        host.rest()
    second.keep_for(first.address)
    time.sleep(0.3)
    assert second.memory.newest([2, 3]) is None and set(first.memory.steps(0)) == {5}
    copy(first, 6)
    until(lambda: first.taken_step == 6)


def test_nobody_reads_copies_without_the_secret(hosts: list[HostCopies]):
    first = hosts[0]
    copy(first, 1)
    with pytest.raises(PeerLost, match="PACELINE_SECRET must be equal"):
        CopyReader(CopyAddress("127.0.0.1", first.address.port, "guessed"), timeout_s=200)


@pytest.mark.parametrize(
    ("slot", "step", "offset", "count"),
    [(0, 1, 1990, 100), (0, 1, -1, 4), (0, 2, 0, 4), (9, 1, 0, 4), (-1, 1, 0, 4)],
)
def test_only_what_is_there_is_given(
    hosts: list[HostCopies], slot: int, step: int, offset: int, count: int
):
    copy(hosts[0], 1)
    with closing(CopyReader(hosts[0].address, timeout_s=200)) as reader:
        with pytest.raises(PeerLost, match="no more"):
            reader.read_into(slot, step, offset, memoryview(bytearray(count)))
        buffer = bytearray(4)
        reader.read_into(0, 1, 0, memoryview(buffer))
        assert buffer == bytes([1, 0, 1, 0]) and reader.extent(0, 1) == (2000, 2011)
        with pytest.raises(PeerLost, match="no copy"):
            reader.extent(0, 9)
