"""The order of data depends on the seed and the cursor alone; ranks only cut it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.streams import key_to_seed
from paceline.job.order import Order, Permutation, Window, split
from paceline.training.feed import DataShard

SEEDS = st.integers(0, 2**63 - 1)
SIZES = st.integers(1, 5000)


@given(size=SIZES, seed=SEEDS)
def test_a_permutation_holds_every_index_once(size: int, seed: int):
    """Any size and seed give a bijection of range(size)."""
    permuted = Permutation(size, seed)(np.arange(size))
    assert np.array_equal(np.sort(permuted), np.arange(size))


@pytest.mark.parametrize("size", [*range(1, 20), 255, 256, 257, 1023, 1024, 1025, 4096, 4097])
def test_a_permutation_of_an_awkward_size(size: int):
    """Sizes at and beside powers of two and four are no exception."""
    assert sorted(Permutation(size, 7)(np.arange(size)).tolist()) == list(range(size))


@given(
    size=st.integers(2**20, 2**48),
    seed=SEEDS,
    positions=st.sets(st.integers(0, 2**20 - 1), max_size=50),
)
def test_a_huge_permutation_needs_no_list(size: int, seed: int, positions: set[int]):
    """Any positions of a data set far larger than memory have distinct indices inside it."""
    permuted = Permutation(size, seed)(np.array(sorted(positions), dtype=np.int64))
    assert len(set(permuted.tolist())) == len(positions)
    assert all(0 <= index < size for index in permuted.tolist())


@given(size=SIZES, seed=SEEDS, first=st.integers(0, 4999))
def test_positions_are_answered_one_by_one_as_together(size: int, seed: int, first: int):
    """What stands at a position does not depend on what else is asked; the argument is left as it was."""
    shuffle, positions = Permutation(size, seed), np.arange(size)
    together = shuffle(positions)
    assert np.array_equal(positions, np.arange(size))
    assert shuffle(np.array([first % size]))[0] == together[first % size]


def test_a_permutation_looks_shuffled():
    """Neighbours do not stay together, and few indices keep their places."""
    permuted = Permutation(5000, 3)(np.arange(5000))
    assert np.sum(np.abs(np.diff(permuted)) == 1) < 20  # 2 are expected of a random order
    assert np.sum(permuted == np.arange(5000)) < 10  # 1 is expected
    assert abs(np.corrcoef(permuted, np.arange(5000))[0, 1]) < 0.06  # 4 sigma


@st.composite
def orders(draw: st.DrawFn) -> Order:
    num_samples = draw(st.integers(1, 120))
    drop_last = draw(st.booleans())
    batch = draw(st.integers(1, num_samples if drop_last else 150))
    return Order(num_samples, batch, draw(st.integers(0, 2**32)), drop_last)


@given(
    order=orders(),
    shares=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    num_microbatches=st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_every_index_once_an_epoch(
    order: Order, shares: list[int], num_microbatches: int, epoch: int
):
    """Over any number of ranks, shares and micro-batches an epoch uses every index once, or as many as drop_last
    leaves."""
    used: list[int] = []
    length = order.epoch_end(0)
    for step in range(epoch * length, (epoch + 1) * length):
        window = order.window(step)
        assert window.epoch == epoch
        for rank in range(len(shares)):
            for cut in DataShard(shares, rank, num_microbatches).cuts(window.count):
                used += order.indices(epoch, window.positions[cut.start : cut.stop])
    left_out = order.num_samples % order.batch if order.drop_last else 0
    assert len(used) == len(set(used)) == order.num_samples - left_out
    assert set(used) <= set(range(order.num_samples))


@given(
    order=orders(),
    shares=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    num_microbatches=st.integers(1, 5),
)
def test_the_cuts_of_a_window_are_in_its_order(
    order: Order, shares: list[int], num_microbatches: int
):
    """Rank after rank and micro-batch after micro-batch, a window is read as one device reads it."""
    count = order.window(0).count
    cuts = [
        cut
        for rank in range(len(shares))
        for cut in DataShard(shares, rank, num_microbatches).cuts(count)
    ]
    assert [offset for cut in cuts for offset in cut] == list(range(count))
    assert len(cuts) == len(shares) * num_microbatches


@given(order=orders(), step=st.integers(0, 2000))
def test_any_step_is_found_without_walking(order: Order, step: int):
    """The window of a step is where counting up from the first leads."""
    epoch = start = 0
    for _ in range(step):
        start += order.batch
        if start >= order.num_samples or (
            order.drop_last and start + order.batch > order.num_samples
        ):
            epoch, start = epoch + 1, 0
    assert order.window(step) == Window(epoch, start, min(order.batch, order.num_samples - start))


def test_a_far_step_is_as_near_as_the_first():
    """A cursor of a long run on a large data set is answered at once."""
    order = Order(num_samples=10**12, batch=4096, seed=0)
    window = order.window(10**11)
    assert len(set(order.indices(window.epoch, window.positions))) == 4096


@pytest.mark.parametrize("positions", [range(4090, 4100), range(3, 9_000), range(8192, 8192)])
def test_runs_cross_the_blocks_of_a_shuffle(positions: range):
    """Indices are those of the permutation, wherever its blocks begin and end."""
    permutation = Permutation(10_000, key_to_seed(0, "order", 1))

    indices = Order(10_000, 4, seed=0).indices(1, positions)

    assert indices == permutation(np.array(positions, dtype=np.int64)).tolist()


def test_the_seed_and_the_epoch_decide_the_order():
    """Another seed or epoch gives another order; the same gives the same."""

    def sequence(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(Order(100, 10, seed).indices(epoch, range(100)))

    sequences = {sequence(seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(sequences) == 25
    assert sequence(3, 2) in sequences


def test_the_order_is_the_same_everywhere():
    """These indices are part of what a checkpoint means: a run resumed by a later version must find them again."""
    assert Order(10, 4, seed=0).indices(0, range(10)) == [3, 9, 2, 7, 5, 4, 8, 6, 0, 1]
    assert Order(10, 4, seed=1).indices(5, range(10)) == [0, 9, 8, 6, 5, 4, 2, 7, 1, 3]


@given(count=st.integers(0, 2000), weights=st.lists(st.integers(1, 100), min_size=1, max_size=12))
def test_split_is_fair(count: int, weights: list[int]):
    """The runs cover the range in order, and each is within one of its exact proportion."""
    runs = split(count, weights)
    assert len(runs) == len(weights)
    assert runs[0].start == 0
    assert runs[-1].stop == count
    assert all(before.stop == after.start for before, after in pairwise(runs))
    assert all(
        abs(len(run) - count * weight / sum(weights)) < 1
        for run, weight in zip(runs, weights, strict=True)
    )


def test_what_is_over_goes_where_most_is_missing():
    """3.33 and 6.67 samples are 3 and 7, not 4 and 6."""
    assert [len(run) for run in split(10, (1, 2))] == [3, 7]
    assert [len(run) for run in split(7, (3, 3, 5))] == [2, 2, 3]


@given(count=st.integers(0, 500), parts=st.integers(1, 12))
def test_equal_shares_differ_by_one_at_most(count: int, parts: int):
    """Equal weights give sizes that differ by one at most, larger ones first."""
    sizes = [len(run) for run in split(count, [1] * parts)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
