"""How operators are timed: in forks, in turns."""

from __future__ import annotations

import os

import pytest

from paceline.model.cost import session
from paceline.model.cost.op_calls import Operand, OperatorCall
from paceline.model.cost.session import TURNS, Timing

MATRIX = Operand((64, 64), (64, 1), "float32", 0.0)
PRODUCT = OperatorCall("aten.mm.default", (MATRIX, MATRIX))
UNHEARD_OF = OperatorCall("aten.mm.unheard_of", (MATRIX,))


@pytest.mark.parametrize("processes", [1, 2])
def test_operators_are_timed_and_one_that_fails_is_left_out(processes: int):
    small, unknown = session.session([PRODUCT, UNHEARD_OF], processes, 1).seconds

    assert 0 < small < 0.1 and unknown == session.CANT


def test_an_operator_that_ends_its_process_is_left_out(monkeypatch):
    """The others are timed all the same."""
    prepared = session.prepared
    monkeypatch.setattr(
        session,
        "prepared",
        lambda call, arena: os._exit(9) if call is UNHEARD_OF else prepared(call, arena),
    )

    times = session.session([PRODUCT, UNHEARD_OF, PRODUCT], 1, 1)

    assert [seconds == session.CANT for seconds in times.seconds] == [False, True, False]
    assert 0 < times.cpu_share <= 1.01


def test_an_operator_beside_that_ends_its_process_is_let_go(monkeypatch):
    prepared = session.prepared
    monkeypatch.setattr(
        session,
        "prepared",
        lambda call, arena: os._exit(9) if call is UNHEARD_OF else prepared(call, arena),
    )

    assert session.session([PRODUCT], 1, 1, beside=[UNHEARD_OF]).seconds[0] > 0


def test_what_there_is_no_time_for_is_not_timed():
    assert session.session([PRODUCT], 2, 1, budget_s=-1.0).seconds == [None]


def test_operators_take_turns_in_groups_of_alike_length(monkeypatch):
    """None is timed alone because there is one more than take turns."""
    lengths: list[int] = []
    monkeypatch.setattr(session, "in_a_fork", lambda run, **_: run())
    monkeypatch.setattr(
        Timing,
        "seconds",
        lambda self, turns, threads: lengths.append(len(turns)) or dict.fromkeys(turns, 1.0),
    )

    assert session.session([PRODUCT] * (TURNS + 1), 1, 1).seconds == [1.0] * (TURNS + 1)
    assert lengths == [TURNS // 2 + 1, TURNS // 2]


class Clock:
    """Each call of an operator takes the next of its seconds; of one that has no more it fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.called = 0.0, ""
        for clock in ("thread_time", "perf_counter", "monotonic"):
            monkeypatch.setattr(session.time, clock, lambda: self.now_s)

    def operator(self, name: str, *seconds: float):
        left = list(seconds)

        def again() -> None:
            self.called += name
            self.now_s += left.pop(0)

        return again


def test_operators_take_turns(monkeypatch):
    """A slow one until it was timed, a brief one as long as any other is, and so are those that are not timed."""
    clock = Clock(monkeypatch)
    brief_s = [2**-12] * 20
    turns = {
        0: clock.operator("a", 1.0, 1.0),
        1: clock.operator("b", *brief_s),
        2: clock.operator("c", *brief_s),
    }

    assert Timing(num_timed=2).seconds(turns, 1) == {0: 1.0, 1: 2**-12}
    assert clock.called == "abcabc" + (session.MOST - 2) * "bc"


def test_an_operator_that_fails_later_does_not_stop_the_others(monkeypatch):
    clock = Clock(monkeypatch)

    assert Timing(num_timed=2).seconds(
        {0: clock.operator("a", 1.0), 1: clock.operator("b", 1.0, 1.0)}, 1
    ) == {0: session.CANT, 1: pytest.approx(1.0)}


def test_what_was_called_once_in_time_is_not_timed(monkeypatch):
    clock = Clock(monkeypatch)

    assert Timing(num_timed=1, deadline_s=0.5).seconds({0: clock.operator("a", 1.0, 1.0)}, 1) == {}


def test_few_calls_are_repeated_until_the_fastest_is_no_accident(monkeypatch):
    """A slow operator is called twice; where both calls were disturbed, up to five times."""

    def timed(*seconds: float) -> tuple[float, int]:
        clock = Clock(monkeypatch)
        (result,) = Timing(num_timed=1).seconds({0: clock.operator("a", *seconds)}, 1).values()
        return result, len(clock.called)

    assert timed(1.0, 1.01, 9.0) == (pytest.approx(1.0), 2)
    assert timed(3.0, 2.0, 1.0, 1.02, 9.0) == (pytest.approx(1.0), 4)
    assert timed(5.0, 4.0, 3.0, 2.0, 1.0, 0.5) == (pytest.approx(1.0), 5)
