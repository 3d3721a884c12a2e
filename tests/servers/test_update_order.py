"""How steps are cut into updates."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.job.order import Order, split
from paceline.servers.update_order import UpdateOrder
from paceline.strategies.plan import Plan
from paceline.strategies.server.keys import Servers


def _turns(
    num_samples: int, batch: int, workers: int, staleness: str, drop_last: bool = False
) -> UpdateOrder:
    sync = Plan.parse(f"servers=1 workers={workers} staleness={staleness}").sync
    assert isinstance(sync, Servers)
    return UpdateOrder(Order(num_samples, batch, 0, drop_last), sync)


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(["1", "inf"]),
)
def test_every_part_of_every_step_in_order(
    num_samples: int, batch: int, workers: int, drop_last: bool, staleness: str
):
    """Each that has samples is a turn, three epochs long, and parts are those that all plans cut."""
    batch = min(batch, num_samples)
    turns = _turns(num_samples, batch, workers, staleness, drop_last)
    expected = []
    for step in range(3 * turns.order.epoch_end(0)):
        count = turns.order.window(step).count
        expected += [
            (step, part, len(share) / count)
            for part, share in enumerate(split(count, (1,) * workers))
            if share
        ]
    actual = [
        (*turns.place(turn), turns.part(turn))
        for turn in range(turns.before(3 * turns.order.epoch_end(0)))
    ]
    assert [place[:2] for place in actual] == [place[:2] for place in expected]
    assert all(
        abs(place[2] - expected_place[2]) < 1e-12
        for place, expected_place in zip(actual, expected, strict=True)
    )


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.integers(0, 60))
def test_whole_steps_and_those_begun(num_samples: int, batch: int, workers: int, count: int):
    """Counting forth and back; between two steps both counts differ by one."""
    turns = _turns(num_samples, min(batch, num_samples), workers, "inf")
    whole, begun = turns.steps(count), turns.begun(count)
    assert turns.before(whole) <= count <= turns.before(begun)
    assert begun - whole == (turns.before(whole) < count)
    assert count < turns.before(whole + 1)


def test_without_staleness_a_turn_is_a_step():
    """Its parts are summed to one update."""
    turns = _turns(25, 8, 3, "0")
    assert [turns.place(turn) for turn in range(5)] == [(step, 0) for step in range(5)]
    assert turns.before(7) == turns.steps(7) == turns.begun(7) == 7 and turns.part(3) == 1.0
