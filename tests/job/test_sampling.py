"""The order of data by a job's own sampler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler

from paceline.base.errors import JobError
from paceline.job import Job
from paceline.job.order import Order
from paceline.proof.order import windows


def job(sampler: Any, *, size: int = 10, batch: int = 4, **fields: Any) -> Job:
    return Job(
        model=torch.nn.Identity,
        loss=min,
        optimizer=torch.optim.SGD,
        data=list(range(size)),
        batch=batch,
        steps=9,
        sampler=sampler,
        **fields,
    )


class ByEpoch:
    """Draws what set_epoch says; its own generator's state is of no matter."""

    def __len__(self) -> int:
        return 7

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epoch + k) % 10 for k in range(7)])


class Lengths(ByEpoch):
    """As Transformers' LengthGroupedSampler: it knows the batch, and draws samples one by one."""

    batch_size = 2


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler(torch.arange(1.0, 11.0), 13),
        RandomSampler(range(10), generator=torch.Generator()),
        RandomSampler(range(10), replacement=True, num_samples=5),
        ByEpoch(),
        Lengths(),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_order_is_what_the_sampler_draws(sampler: Any, drop_last: bool):
    """The same from any step on, for the engine and for the proof's own loop; and another in each epoch."""
    made = job(sampler, drop_last=drop_last)
    order, expected = Order.of(made), list(islice(windows(made), 9))
    for step in (8, 0, 3, 8, 5):
        window = Order.of(made).window(step)
        epoch, positions, indices = expected[step]
        assert (window.epoch, list(window.positions)) == (epoch, positions)
        assert order.indices(epoch, window.positions) == indices
    whole = range(len(sampler))
    assert order.indices(0, whole) != order.indices(1, whole)
    assert made.num_samples == len(sampler)


def test_samples_may_come_in_their_own_order():
    """As for validation, or for curricula."""
    assert Order.of(job(SequentialSampler(range(10)))).indices(3, range(10)) == list(range(10))


def test_drawing_leaves_the_streams_alone():
    """A model's dropout does not depend on whether an epoch begins."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    Order.of(job(RandomSampler(range(10)))).indices(0, range(4))
    assert torch.equal(torch.get_rng_state(), before)


class Stateful(ByEpoch):
    """Goes on with a generator of its own."""

    def __init__(self) -> None:
        self.random_numbers = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        return iter([self.random_numbers.randrange(10) for _ in range(7)])


class Short(ByEpoch):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


class Outside(ByEpoch):
    def __iter__(self) -> Iterator[int]:
        return iter([10] * 7)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (Stateful(), "the sampler Stateful drew other samples when it was asked twice"),
        (Short(), "has the length 7 and drew 2 samples in epoch 0"),
        (Outside(), "drew 10, and the data has the indices 0 to 9"),
    ],
)
def test_a_sampler_that_no_order_can_follow_is_refused(sampler: Any, message: str):
    """Ranks would not agree, or a resumed run would see other samples."""
    with pytest.raises(JobError, match=message):
        Order.of(job(sampler)).indices(0, range(4))


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (3, "sampler must have __iter__ and __len__"),
        (
            torch.utils.data.BatchSampler(SequentialSampler(range(4)), 2, False),
            "and the sampler draws batches of 2",
        ),
        (
            torch.utils.data.DistributedSampler(range(4), 2, 0),
            "a DistributedSampler draws one rank's part",
        ),
    ],
)
def test_what_is_no_sampler_for_all_devices_is_refused(sampler: Any, message: str):
    """With what to give in its place."""
    with pytest.raises(JobError, match=message):
        job(sampler)
