"""Orders of work in a pipeline: complete, never blocking, with the bubble and the memory that they promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bubble import bubble
from paceline.strategies.stages.keys import SCHEDULES
from paceline.strategies.stages.schedule import (
    Action,
    blocked,
    in_flight,
    schedule,
    stages_of,
)


@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 9), st.integers(2, 3))
def test_every_order_is_complete_and_never_blocks(name, num_ranks, num_microbatches, virtual):
    """Each stage takes each micro-batch forward and backward once; weights' gradients come after those of inputs."""
    virtual = virtual if name == "interleaved" else 1
    orders = schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, virtual=virtual)
    kinds = ("F", "I", "W") if name == "zero-bubble" else ("F", "B")

    for rank, order in enumerate(orders):
        stages = stages_of(rank, num_ranks=num_ranks, virtual=virtual)
        expected = [
            Action(kind, stage, m)
            for kind in kinds
            for stage in stages
            for m in range(num_microbatches)
        ]
        assert sorted(order) == sorted(expected)
        for stage in (
            stages
        ):  # gradients of a stage come in the order of its micro-batches: sums are reproducible
            back = [a.microbatch for a in order if a.stage == stage and a.kind == kinds[-1]]
            assert back == sorted(back)
    assert not blocked(orders, num_stages=num_ranks * virtual)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (4, 4), (3, 9)])
def test_gpipe_and_1f1b_idle_alike_and_1f1b_holds_less(num_ranks, num_microbatches):
    """(p-1)/(m+p-1) of the time (Huang et al. 2019); 1F1B has as many forwards in flight as stages are left."""
    gpipe, one_f_one_b = (
        schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        for name in ("gpipe", "1f1b")
    )
    expected = (num_ranks - 1) / (num_microbatches + num_ranks - 1)

    assert bubble(gpipe, num_stages=num_ranks) == pytest.approx(expected)
    assert bubble(one_f_one_b, num_stages=num_ranks) == pytest.approx(expected)
    assert [in_flight(order) for order in gpipe] == [num_microbatches] * num_ranks
    assert [in_flight(order) for order in one_f_one_b] == list(range(num_ranks, 0, -1))


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_interleaved_and_zero_bubble_idle_less(num_ranks, num_microbatches):
    """Interleaving divides the bubble by the stages a rank; zero bubble keeps 1F1B's memory of the first rank."""
    one_f_one_b = schedule("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    turns = schedule(
        "interleaved", num_ranks=num_ranks, num_microbatches=num_microbatches, virtual=2
    )
    zero = schedule("zero-bubble", num_ranks=num_ranks, num_microbatches=num_microbatches)
    idle = bubble(one_f_one_b, num_stages=num_ranks)
    ratio = (num_ranks - 1) / num_microbatches / 2

    assert bubble(turns, num_stages=2 * num_ranks) == pytest.approx(ratio / (1 + ratio))
    assert bubble(zero, num_stages=num_ranks) < 0.75 * idle
    assert max(map(in_flight, zero)) <= num_ranks
