"""Bounded staleness under any order of events: the bound holds, every step is made once, and none is forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.servers.clock import Clock, Lease


class Play:
    """Workers and servers in one thread, which do what `draw` picks; it remembers what each lease could see."""

    def __init__(self, clock: Clock, num_workers: int) -> None:
        self.clock = clock
        self.leased: dict[int, list[Lease]] = {
            w: [] for w in range(num_workers)
        }  # the first of them is computed
        self.sending: list[tuple[int, int]] = []  # (server, update) that are on their way
        self.made: list[int] = []
        self.by_worker: dict[int, list[int]] = {
            w: [] for w in range(num_workers)
        }  # versions when its steps were made
        self.owner: dict[int, int] = {}
        for worker in range(num_workers):
            clock.join(worker)

    def moves(self) -> list[tuple]:
        possible_moves: list[tuple] = [("ask", w) for w in self.clock.workers]
        possible_moves += [("finish", w) for w in self.clock.workers if self.can_finish(w)]
        return (
            possible_moves
            + [("hold", *place) for place in self.sending]
            + [("make", u) for u in self.clock.ready()]
        )

    def do(self, move: tuple) -> bool:
        """Whether anything came of it."""
        kind, *which = move
        if kind == "ask":
            lease = self.clock.lease(which[0])
            if lease is None:
                return False
            self.check_bound(which[0], lease)
            self.leased[which[0]].append(lease)
            self.owner[lease.update] = which[0]
        elif kind == "finish":
            lease = self.leased[which[0]].pop(0)
            self.clock.finished(which[0], lease.update)
            if lease.part == 0:
                self.sending += [(s, lease.update) for s in range(self.clock.num_servers)]
        elif kind == "hold":
            self.sending.remove((which[0], which[1]))
            self.clock.gradient_complete(*which)
        else:
            self.made.append(self.clock.made(which[0]))
            self.by_worker.setdefault(self.owner[which[0]], []).append(self.clock.version)
        return True

    def can_finish(self, worker: int) -> bool:
        """Whether the weights that it needs are there; without staleness it may be told of them before they are."""
        return bool(self.leased[worker]) and self.leased[worker][0].version <= self.clock.version

    def check_bound(self, worker: int, lease: Lease) -> None:
        """Weights of the lease's version have every worker's steps but its last `staleness`."""
        bound = self.clock.staleness
        if not bound:
            assert bound is None or lease.version == lease.turn
            return
        assert lease.version <= self.clock.version
        member_state = self.clock.workers[worker]
        needed = member_state.finished + member_state.sent + len(member_state.leased) - 1 - bound
        for other, member in self.clock.workers.items():
            assert member.finished >= needed, (
                f"worker {worker} is more than {bound} ahead of {other}"
            )
            seen = sum(version <= lease.version for version in self.by_worker[other])
            assert seen >= needed, f"version {lease.version} lacks steps of worker {other}"

    def kill(self, worker: int) -> None:
        leased = self.leased.pop(worker)
        dropped = self.clock.leave(worker)
        assert {lease.update for lease in leased} <= set(dropped)
        self.sending = [(s, u) for s, u in self.sending if u not in dropped]


def played(clock: Clock, num_workers: int, data: st.DataObject) -> Play:
    """All moves of a run until its end, in an order that is drawn."""
    play = Play(clock, num_workers)
    for _ in range(600):
        moves = play.moves()
        if clock.is_drained:
            break
        picked = data.draw(st.integers(0, len(moves) - 1))
        # A move that must wait lets another one happen: somebody can always go on.
        assert any(play.do(move) for move in (*moves[picked:], *moves[:picked])), "everybody waits"
    return play


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 1, 3, None]))
def test_any_order_of_events(
    data: st.DataObject, num_workers: int, num_servers: int, staleness: int | None
):
    """Whatever is slow: the run ends with every step made once, and no version breaks the bound."""
    clock = Clock(num_workers=num_workers, num_servers=num_servers, staleness=staleness, end=9)
    play = played(clock, num_workers, data)
    assert clock.is_drained and sorted(play.made) == list(range(9))
    if staleness == 0:
        assert play.made == list(range(9))


@given(st.data(), st.integers(0, 3), st.sets(st.integers(1, 4)), st.sampled_from([1, 3, None]))
def test_the_updates_that_a_copy_lacks_are_made(
    data: st.DataObject, first: int, ahead: set[int], staleness: int | None
):
    """A clock that goes on from a copy gives out the turns that are missing in it, and no other."""
    later = {first + turn for turn in ahead}
    clock = Clock(
        num_workers=2, num_servers=1, staleness=staleness, first=first, later=later, end=9
    )
    play = played(clock, 2, data)
    assert clock.is_drained and sorted([*play.made, *later, *range(first)]) == list(range(9))


@given(st.data(), st.sampled_from([1, 2, None]))
def test_the_steps_of_the_dead_are_made_by_others(data: st.DataObject, staleness: int | None):
    """Two of three die at any moments: no step is lost and none made twice."""
    clock = Clock(num_workers=3, num_servers=2, staleness=staleness, end=8)
    play = Play(clock, 3)
    deaths = {data.draw(st.integers(0, 40)): 0, data.draw(st.integers(41, 80)): 2}
    for turn in range(600):
        if turn in deaths:
            play.kill(deaths[turn])
        if clock.is_drained:
            break
        moves = play.moves()
        picked = data.draw(st.integers(0, len(moves) - 1))
        assert any(play.do(move) for move in (*moves[picked:], *moves[:picked])), "everybody waits"
    assert clock.is_drained and sorted(play.made) == list(range(8))


def _finish(clock: Clock, worker: int, lease: Lease) -> None:
    clock.finished(worker, lease.update)
    clock.gradient_complete(0, lease.update)
    for update in clock.ready():
        clock.made(update)


def test_a_straggler_stops_others_at_the_bound():
    """With a bound of 2 a fast worker takes three steps beside one that takes none, then waits."""
    clock = Clock(num_workers=2, num_servers=1, staleness=2, end=100)
    clock.join(0)
    clock.join(1)
    slow = clock.lease(0)
    for _ in range(3):
        lease = clock.lease(1)
        assert lease is not None
        _finish(clock, 1, lease)

    assert clock.lease(1) is None
    assert slow is not None
    _finish(clock, 0, slow)
    lease = clock.lease(1)
    assert lease is not None and lease.version == 4


def test_without_a_bound_nobody_waits():
    """A worker may take every step while another sleeps."""
    clock = Clock(num_workers=2, num_servers=1, staleness=None, end=50)
    clock.join(0)
    clock.join(1)
    clock.lease(0)
    for _ in range(49):
        lease = clock.lease(1)
        assert lease is not None
        _finish(clock, 1, lease)
    assert clock.version == 49


def test_a_newcomer_is_as_far_as_the_slowest():
    """It neither holds the others back nor may it run ahead; its number may have been used before."""
    clock = Clock(num_workers=2, num_servers=1, staleness=1, end=100)
    clock.join(0)
    for _ in range(5):
        lease = clock.lease(0)
        assert lease is not None
        _finish(clock, 0, lease)
    clock.join(1)
    assert clock.lease(0) is not None
    clock.leave(1)
    clock.join(1)
    assert clock.lease(1) is not None
    with pytest.raises(ValueError, match="is there already"):
        clock.join(1)


def test_a_dropped_update_is_not_made():
    """What a server says of it later is no news, and its step has another number."""
    clock = Clock(num_workers=2, num_servers=1, staleness=None, end=10)
    clock.join(0)
    clock.join(1)
    lost = clock.lease(0)
    assert lost is not None
    assert clock.leave(0) == [lost.update]
    clock.gradient_complete(0, lost.update)
    again = clock.lease(1)

    assert again is not None and again.turn == lost.turn and again.update != lost.update
    assert clock.ready() == []
