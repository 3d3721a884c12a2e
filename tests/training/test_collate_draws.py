"""What a job's collate draws: the same for each sample however a window is cut, and refused where it can't be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import paceline
from paceline.base.errors import TrainingError
from paceline.job.order import Order
from paceline.training.feed import DataShard, training_feed


def job(collate: Callable[[list[Any]], Any], *, stream: bool = False) -> paceline.Job:
    rows = [torch.full((3,), float(i)) for i in range(10)]

    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(rows)

    return paceline.Job(
        model=lambda: torch.nn.Linear(3, 3),
        data=Stream() if stream else rows,
        collate=collate,
        loss=torch.nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        batch=7,
        epochs=2,
    )


def inputs(
    given: paceline.Job, shares: tuple[int, ...], *, microbatches: int = 1
) -> list[torch.Tensor]:
    """Of each step, what all ranks' micro-batches have, one after the other."""
    order = None if isinstance(given.data, torch.utils.data.IterableDataset) else Order.of(given)
    feeds = [
        training_feed(
            given,
            order=order,
            part=DataShard(shares, rank, microbatches),
            steps=range(4),
            loader_workers=0,
        )
        for rank in range(len(shares))
    ]
    return [
        torch.cat([batch.input[: batch.samples] for _, batches in parts for batch in batches])
        for parts in zip(*feeds, strict=True)
    ]


def noisy(samples: list[torch.Tensor]) -> torch.Tensor:
    x = torch.stack(samples) + torch.randn(len(samples), 3)
    return x * torch.bernoulli(torch.full_like(x, 0.5)) + torch.rand(())


def mixed(samples: list[torch.Tensor]) -> torch.Tensor:
    x = torch.stack(samples)
    return x + x[torch.randperm(len(x))]


@pytest.mark.parametrize("stream", [False, True])
def test_a_sample_gets_the_same_numbers_however_the_window_is_cut(stream: bool):
    """Also in a window that is shorter than the ranks are many; epochs differ."""
    whole = inputs(job(noisy, stream=stream), (1,))

    assert not torch.equal(whole[0].sort().values, whole[2].sort().values)
    for shares, microbatches in (((1, 1), 1), ((3, 1), 2), ((1, 1, 1, 1), 1)):
        cut = inputs(job(noisy, stream=stream), shares, microbatches=microbatches)
        assert all(map(torch.equal, cut, whole))


def test_what_mixes_samples_or_draws_by_itself_is_refused_where_the_window_is_cut():
    """With the whole window both run, as before."""
    generator = torch.Generator().manual_seed(0)
    seeded_job = job(
        lambda samples: torch.stack(samples) + torch.randn(3, generator=generator) + torch.rand(1)
    )

    assert len(inputs(job(mixed), (1,))) == len(inputs(seeded_job, (1,))) == 4
    with pytest.raises(
        TrainingError, match=r"collate draws torch.randperm\(4\) where it has 4 of the step's 7"
    ):
        inputs(job(mixed), (1, 1))
    with pytest.raises(TrainingError, match="collate draws from a generator of its own"):
        inputs(seeded_job, (1, 1))


def test_a_collate_that_draws_nothing_runs_once_a_batch():
    """And one that draws, once more in the first."""
    calls: list[int] = []

    def plain(samples: list[torch.Tensor]) -> torch.Tensor:
        calls.append(len(samples))
        return torch.stack(samples)

    inputs(job(plain), (1,))
    assert calls == [7, 3, 7, 3]
    calls.clear()
    inputs(job(lambda samples: plain(samples) + torch.randn(1)), (1,))
    assert calls == [7, 7, 3, 7, 3]
