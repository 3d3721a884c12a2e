"""Who may go on without whom: a majority alone, and by one log, of which one host writes the next entry."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from paceline.base.errors import ClusterError
from paceline.launch.hosts.host_log import HostLog, HostSign
from paceline.launch.hosts.host_process import Host
from paceline.launch.hosts.leader_log import HostEntry, LeaderState, successor
from paceline.launch.hosts.rendezvous_server import MeetingPlace, RunOver

HOSTS = range(5)
GROUPS = st.frozensets(st.sampled_from(HOSTS))
STANDINGS = st.builds(
    LeaderState,
    epoch=st.just(3),
    keeper=st.sampled_from(HOSTS),
    members=GROUPS,
    num_starts=st.just(2),
    has_ended=st.just(False),
)


def opened(
    host: int, epoch: int, voters: tuple[int, ...] = (), *, is_anew: bool = False
) -> HostEntry:
    return HostEntry(kind="open", host=host, epoch=epoch, hosts=voters, is_anew=is_anew)


def started(epoch: int, *hosts: int) -> HostEntry:
    return HostEntry(kind="start", host=hosts[0], epoch=epoch, hosts=hosts)


def after(*entries: HostEntry) -> LeaderState:
    standing = LeaderState()
    for entry in entries:
        assert standing.allows(entry)
        standing = standing.after(entry)
    return standing


THREE = opened(0, 1, is_anew=True), started(1, 0, 1, 2)


@given(STANDINGS, GROUPS, GROUPS)
def test_of_two_groups_one_at_most_goes_on(
    standing: LeaderState, group: frozenset[int], other: frozenset[int]
):
    """A minority never does, and half of the hosts with the keeper alone."""
    other -= group
    members = standing.members
    if members:
        assert not (standing.is_enough(group) and standing.is_enough(other))
        assert not standing.is_enough(group) or 2 * len(group & members) >= len(members)
        assert standing.is_enough(members)
        assert standing.is_enough(
            sorted(members)[: standing.least_hosts]
            if standing.keeper not in members
            else [standing.keeper, *sorted(members - {standing.keeper})][: standing.least_hosts]
        )


@given(STANDINGS, GROUPS)
def test_the_lowest_of_a_majority_comes_first(standing: LeaderState, voters: frozenset[int]):
    order = successor(standing, voters)
    assert list(order) == sorted(order) and set(order) <= standing.members & voters
    assert bool(order) == bool(standing.members and standing.is_enough(voters))


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(HOSTS), st.sampled_from(["open", "start", "leave", "look"]), GROUPS
        ),
        max_size=40,
    )
)
def test_each_start_has_a_majority_of_the_one_before(acts: list[tuple[int, str, frozenset[int]]]):
    """Whatever hosts do that have read an old part of the log: the rules allow their next entry, or it is none."""
    log = [after(opened(0, 1, is_anew=True), started(1, *HOSTS))]
    sides = dict.fromkeys(HOSTS, log[0])
    for host, act, group in acts:
        seen = sides[host]
        entry = {
            "open": opened(host, seen.epoch + 1, tuple(group)),
            "leave": HostEntry(kind="leave", host=host, epoch=seen.epoch),
            "start": started(seen.epoch, *sorted(group | {host})),
        }.get(act)
        sides[host] = log[-1]
        if entry is None or not log[-1].allows(entry):
            continue
        now = log[-1]
        log.append(now.after(entry))
        if entry.kind == "start":
            assert entry.epoch == now.epoch  # of a keeper that was not replaced
            here, extra = now.members & set(entry.hosts), now.keeper in entry.hosts
            assert 2 * len(here) > len(now.members) or (2 * len(here) == len(now.members) and extra)


def test_three_hosts_without_the_first():
    standing = after(*THREE)
    assert successor(standing, [2]) == () == successor(standing, [0, 4]) and successor(
        standing, [2, 1]
    ) == (1, 2)
    assert not standing.allows(opened(2, 2, (2,))) and not standing.allows(started(1, 0))
    moved = after(*THREE, opened(1, 2, (1, 2)))
    assert not moved.allows(started(1, 0, 1, 2)) and not moved.allows(opened(2, 2, (1, 2)))
    assert moved.allows(started(2, 1, 2)) and not moved.allows(started(2, 2))


def test_two_hosts_without_one():
    """The keeper goes on without the other, and not the other way round, except where the keeper said that it left."""
    pair = opened(0, 1, is_anew=True), started(1, 0, 1)
    assert after(*pair).allows(started(1, 0)) and successor(after(*pair), [1]) == ()
    assert successor(after(*pair, HostEntry(kind="leave", host=0, epoch=1)), [1]) == (1,)


def test_a_run_that_has_ended_begins_anew():
    over = after(*THREE, HostEntry(kind="end", host=1, epoch=1))
    left = after(*THREE, *(HostEntry(kind="leave", host=host, epoch=1) for host in range(3)))
    for standing in over, left:
        assert standing.is_over and not standing.allows(started(1, 0, 1, 2))
        assert not standing.allows(opened(1, 2, (1, 2)))
        begun = standing.after(opened(0, 2, is_anew=True))
        assert not begun.is_over and begun.num_starts == 0 and begun.is_enough([0])


# --- Files ----------------------------------------------------------------------------------------------------------


def test_one_of_many_writes_the_next_entry(tmp_path: Path):
    logs, gate = [HostLog(tmp_path) for _ in range(8)], threading.Barrier(8)
    done: list[bool] = []

    def write(host: int) -> None:
        gate.wait()
        done.append(logs[host].append(opened(host, 1, is_anew=True)))

    threads = [threading.Thread(target=write, args=(host,)) for host in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(done) == 1 and len({log.read() for log in logs}) == 1
    assert [path.name for path in logs[0].folder.iterdir()] == ["000001.json"]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b'{"kind":"open","host":-1,"epoch":1}',
        b"\x80\x04K\x01.",
        b'{"kind":"rule","host":0,"epoch":1}',
    ],
)
def test_a_damaged_entry_is_refused(tmp_path: Path, damage: bytes):
    log = HostLog(tmp_path)
    log.append(THREE[0])
    (log.folder / "000002.json").write_bytes(damage)
    with pytest.raises(ClusterError, match=r"000002.json is damaged"):
        log.read()


def test_signs_of_life(tmp_path: Path):
    log, sign = HostLog(tmp_path), HostSign(beats=3, joined=1, lost=0)
    log.sign(11, sign)
    (log.folder / "host-2.json").write_text("[]")
    assert log.signs() == {11: sign}


# --- Meeting --------------------------------------------------------------------------------------------------------


def test_the_meeting_place_moves(tmp_path: Path):
    """Without the first host's, the second opens one; the first learns of it before its next word, and comes too."""
    host_0, host_1, host_2 = (
        MeetingPlace(Host("test", index, 3, 1, "127.0.0.1", 1, 1), tmp_path, patience_s=1)
        for index in range(3)
    )
    with pytest.raises(RendezvousConnectionError, match="host 0 has opened no meeting place yet"):
        host_1.meet()
    host_0.meet()
    for host in host_1, host_2:
        host.meet().set("word", "kept")
    assert host_0.start([0, 1, 2]) == 1 and host_0.start([0]) == 0
    host_0._kept_store = None  # its process is gone, and the store with it
    with pytest.raises(
        RendezvousConnectionError, match="the others go on without it, once more than half"
    ):
        host_2.meet()  # it says so, and waits for host 1
    assert not host_1.meet().check(["word"])
    host_2.meet()
    host_0.log.read()
    with pytest.raises(RendezvousConnectionError, match="host 1 keeps the meeting place now"):
        host_0.check()
    assert host_0.start([0, 1, 2]) == 0 and host_1.is_kept_here
    host_0.meet()
    assert not host_0.is_kept_here and host_1.start([1, 2, 0]) == 2
    host_2.leave(ends_run=True)
    with pytest.raises(RunOver):
        host_0.meet()
