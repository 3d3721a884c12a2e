"""Ranks that share parameters call the same blocks, asked each time or expected; one that does not is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.base.errors import TrainingError
from paceline.strategies.shard import order_check
from paceline.strategies.shard.order_check import ALIKE, OrderCheck

UNITS = ["a", "b", "c"]
RunRanks = Callable[..., list[Any]]


class Alone(OrderCheck):
    """Of one rank; notes what it would have asked the others."""

    def __init__(self, *, expects: bool = True) -> None:
        super().__init__(UNITS, None, [0], expects=expects)  # type: ignore[arg-type]
        self.comparisons: list[tuple[int, bool]] = []

    def _compare(self, unit: int, *, may_be_alone: bool) -> None:
        self.comparisons.append((unit, may_be_alone))


def forward(called: OrderCheck, units: Sequence[int]) -> None:
    for unit in units:
        called.call(unit)
    called.end()


def test_what_always_came_next_is_not_asked_again():
    check = Alone()
    for _ in range(ALIKE + 5):
        forward(check, [0, 1])
    assert check.comparisons == [(0, False), (1, False), (3, False)] * ALIKE


def test_ranks_that_do_not_expect_ask_each_time():
    check = Alone(expects=False)
    for _ in range(ALIKE + 5):
        forward(check, [0])
    assert check.comparisons == [(0, False), (3, False)] * (ALIKE + 5)


@pytest.mark.parametrize("expects", [True, False])
def test_ways_without_number_are_not_kept(monkeypatch: pytest.MonkeyPatch, expects: bool):
    monkeypatch.setattr(order_check, "MOST_PLACES", 7)
    check = Alone(expects=expects)
    for number in range(200):
        forward(check, [number >> bit & 1 for bit in range(8)])
    assert check.num_places == (7 if expects else 0)


def test_another_way_is_asked_and_then_so_is_every_choice_there():
    check = Alone()
    for _ in range(ALIKE):
        forward(check, [0, 1])
    check.comparisons.clear()
    forward(check, [0, 2])
    assert check.comparisons == [(2, True), (3, False)]
    check.comparisons.clear()
    forward(check, [0, 1])
    assert check.comparisons == [(1, False)]


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=30))
@settings(deadline=None)
def test_a_rank_that_asks_is_never_alone_among_ranks_that_go_alike(forwards: list[list[int]]):
    """Ranks with one history ask at the same calls, so that no collective of theirs is missed."""
    check, other_check = Alone(), Alone()
    for units in forwards:
        forward(check, units)
        forward(other_check, units)
        assert check.comparisons == other_check.comparisons


def _run(context: Any, ways: list[list[int]]) -> str:
    order_check.PATIENCE_S = 2.0
    check = OrderCheck(UNITS, dist.new_group([0, 1], backend="gloo"), [0, 1], expects=True)
    for _ in range(ALIKE + 1):
        forward(check, [0, 1])
    try:
        forward(check, ways[context.rank])
    except TrainingError as error:
        return error.args[0]
    return "went on"


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("ways", "messages"),
    [
        ([[0, 1], [0, 1]], ["went on"] * 2),
        ([[0, 2], [0, 2]], ["went on"] * 2),
        (
            [[0, 2], [0, 1]],
            [
                "this rank calls 'c', and the ranks that it shares parameters with did not within 2 s: a rank "
                "that goes on as before calls 'b'",
                "went on",
            ],
        ),
        (
            [[0, 1], [0]],
            [
                "went on",
                "this rank is at the end of forward, and the ranks that it shares parameters with did "
                "not within 2 s: a rank that goes on as before calls 'b'",
            ],
        ),
        (
            [[0, 2], [0]],
            [
                "ranks that share parameters call different blocks of the model: rank 0 calls 'c', rank 1 is at "
                "the end of forward"
            ]
            * 2,
        ),
    ],
)
def test_ranks_that_part_are_named(run_ranks: RunRanks, ways: list[list[int]], messages: list[str]):
    assert run_ranks(lambda context: _run(context, ways), 2) == messages
