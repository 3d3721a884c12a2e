"""Micro-batches: the same samples, looking the same, however many ranks and loader workers fetch them."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from paceline.base.errors import JobError, TrainingError
from paceline.base.nested import map_tensors
from paceline.job import Job
from paceline.job.order import Order
from paceline.launch.process.failure import failure_of
from paceline.launch.process.heartbeats import Heartbeat
from paceline.training.feed import (
    DataShard,
    MicroBatch,
    evaluation_feed,
    fetch,
    is_stream,
    training_feed,
)

SAMPLES = 23


class Augmented(Dataset[Any]):
    """Sample i is (i, what each generator drew for it)."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        drawn = torch.cat([torch.rand(1), torch.tensor([random.random(), np.random.rand()])])
        return torch.cat([torch.tensor([float(index)]), drawn]), index


class Numbers(IterableDataset[Any]):
    """A stream of `count` samples; each pass begins at a number of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            yield torch.tensor([float(index), torch.rand(1).item()]), 100 * self.epoch + index


def feed(
    data: Any,
    *,
    batch: int = 5,
    shares: tuple[int, ...] = (1,),
    rank: int = 0,
    num_microbatches: int = 1,
    steps: range = range(10),
    epochs: int | None = None,
    drop_last: bool = False,
    loader_workers: int = 0,
) -> list[Any]:
    job = job_of(data, batch=batch, epochs=epochs, drop_last=drop_last)
    order = None if is_stream(data) else Order(len(data), batch, 0, drop_last)
    return list(
        training_feed(
            job,
            order=order,
            steps=steps,
            part=DataShard(shares, rank, num_microbatches),
            loader_workers=loader_workers,
        )
    )


def job_of(data: Any, **fields: Any) -> Job:
    """A job of which nothing matters but the data."""
    length = {"steps": 10**9} if fields.get("epochs") is None else {}
    return Job(
        model=torch.nn.Identity,
        loss=lambda output, target: output,
        optimizer=torch.optim.SGD,
        data=data,
        **{**fields, **length},
    )


def samples_of(batches: list[MicroBatch]) -> list[list[float]]:
    """The rows that count."""
    return [row for batch in batches for row in batch.input[: batch.samples].tolist()]


# --- Data sets with a length ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "num_microbatches"), [((1, 1), 1), ((1, 1, 1), 2), ((3, 1), 1), ((1,) * 5, 1)]
)
def test_a_sample_looks_the_same_on_any_number_of_ranks(
    shares: tuple[int, ...], num_microbatches: int
):
    """Augmentation by torch, random and NumPy depends on a sample's place in the epoch, not on who fetches it."""
    alone = [samples_of(batches) for _, batches in feed(Augmented())]
    ranks = [
        feed(Augmented(), shares=shares, rank=rank, num_microbatches=num_microbatches)
        for rank in range(len(shares))
    ]
    together = [
        [row for _, batches in parts for row in samples_of(batches)]
        for parts in zip(*ranks, strict=True)
    ]
    assert together == alone
    assert {len(batches) for parts in ranks for _, batches in parts} == {num_microbatches}


def test_a_sample_looks_the_same_after_a_seek():
    """A run resumed at any step, in the middle of an epoch too, gets what the uninterrupted one got."""
    walked = feed(Augmented())
    for step in (1, 4, 7):
        windows = feed(Augmented(), steps=range(step, 10))
        assert [samples_of(batches) for _, batches in windows] == [
            samples_of(b) for _, b in walked[step:]
        ]
        assert [window for window, _ in windows] == [window for window, _ in walked[step:]]


def test_augmentation_differs_between_epochs():
    """A sample is not augmented in the same way every time."""
    windows = feed(Augmented(), batch=SAMPLES, steps=range(2))
    first, second = ({row[0]: row[1:] for row in samples_of(batches)} for _, batches in windows)
    assert first.keys() == second.keys()
    assert all(first[index] != second[index] for index in first)


def test_augmentation_differs_between_samples():
    """Each of the three generators draws afresh for every sample."""
    [(_, [batch])] = feed(Augmented(), batch=SAMPLES, steps=range(1))
    for column in (1, 2, 3):
        assert len(set(batch.input[:, column].tolist())) == SAMPLES


def test_loader_workers_change_nothing():
    """Batches made by two processes are those made by none, in order, also from the middle on."""
    options: dict[str, Any] = {
        "shares": (2, 1),
        "rank": 0,
        "num_microbatches": 2,
        "steps": range(3, 9),
    }
    plain, loaded = feed(Augmented(), **options), feed(Augmented(), loader_workers=2, **options)
    assert [window for window, _ in plain] == [window for window, _ in loaded]
    for (_, batches), (_, loaded_batches) in zip(plain, loaded, strict=True):
        assert [batch.samples for batch in batches] == [batch.samples for batch in loaded_batches]
        assert all(
            torch.equal(a.input, b.input) and torch.equal(a.target, b.target)
            for a, b in zip(batches, loaded_batches, strict=True)
        )


def test_a_rank_without_samples_gets_a_stand_in():
    """In a short last batch every rank has equally many micro-batches; a stand-in is a real sample that counts 0."""
    ranks = [
        feed(
            Augmented(),
            batch=22,
            shares=(1, 1, 1),
            rank=rank,
            num_microbatches=2,
            steps=range(1, 2),
        )
        for rank in range(3)
    ]
    assert [[batch.samples for batch in batches] for [(_, batches)] in ranks] == [
        [1, 0],
        [0, 0],
        [0, 0],
    ]
    assert all(batch.input.shape == (1, 4) for [(_, batches)] in ranks for batch in batches)


def test_drop_last_leaves_out_the_short_batch():
    """With drop_last every window is whole, and the next epoch begins where the short one would stand."""
    windows = feed(Augmented(), drop_last=True, steps=range(8))
    assert [(window.epoch, window.count) for window, _ in windows] == [(0, 5)] * 4 + [(1, 5)] * 4


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES * 2.0).view(SAMPLES, 2), torch.arange(SAMPLES))


class Slow(Dataset[Any]):
    """A data set whose items are those of another."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


@pytest.mark.parametrize(
    "data",
    [
        tensors(),
        Subset(tensors(), [9, 3, 17, 5, 1, 0, 8]),
        Subset(Subset(tensors(), range(4, 20)), [2, 0, 5]),
    ],
)
def test_tensors_are_gathered_as_items_are_stacked(data: Any):
    """The fast path for tensors, and for subsets of them, gives what item by item gives."""
    for (_, [fast]), (_, [slow]) in zip(
        feed(data, batch=2), feed(Slow(data), batch=2), strict=True
    ):
        assert torch.equal(fast.input, slow.input)
        assert torch.equal(fast.target, slow.target)
        assert fast.target.dtype == slow.target.dtype


def test_a_list_is_a_data_set():
    """Anything with a length and items will do."""
    [(_, [batch])] = feed(
        [(torch.tensor([float(i)]), i) for i in range(4)], batch=4, steps=range(1)
    )
    assert sorted(batch.target.tolist()) == [0, 1, 2, 3]


# --- Inputs of several tensors ----------------------------------------------------------------------------------


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (torch.ones(2), [1.0]),
        ((torch.ones(2), 2 * torch.ones(2)), [1.0, 2.0]),
        ([torch.ones(2), 2 * torch.ones(2)], [1.0, 2.0]),
        (Pair(torch.ones(2), 2 * torch.ones(2)), [1.0, 2.0]),
        ({"right": 2 * torch.ones(2), "left": torch.ones(2)}, [1.0, 2.0]),
    ],
)
def test_how_the_model_is_called(item: Any, expected: list[float]):
    """A tuple or list input is passed as *args, a mapping as **kwargs, anything else as one argument."""

    def model(left: torch.Tensor, right: torch.Tensor | None = None) -> list[float]:
        assert left.shape == (3, 2)
        return [float(tensor[0, 0]) for tensor in (left, right) if tensor is not None]

    [(_, [batch])] = feed([(item, 0)] * 3, batch=3, steps=range(1))
    assert batch.call(model) == expected
    assert batch.to(torch.device("cpu"), torch.float64).call(model) == expected


def test_only_floating_point_tensors_change_their_type():
    """A float64 job moves floats; token ids and class numbers stay whole numbers, other values stay what they are."""
    moved = MicroBatch(
        {"ids": torch.ones(2, dtype=torch.int64), "x": [torch.ones(2)], "name": ["a", "b"]},
        torch.ones(2, dtype=torch.int32),
        2,
    ).to(torch.device("cpu"), torch.float64)
    assert moved.input["ids"].dtype == torch.int64
    assert moved.input["x"][0].dtype == torch.float64
    assert moved.input["name"] == ["a", "b"]
    assert moved.target.dtype == torch.int32
    assert moved.samples == 2


def test_map_tensors_keeps_named_tuples():
    """The structure around the tensors is the user's and stays."""
    mapped = map_tensors(
        lambda tensor: tensor + 1, {"pair": Pair(torch.zeros(1), (torch.ones(1), "text"))}
    )
    assert isinstance(mapped["pair"], Pair)
    assert mapped["pair"].right == (torch.tensor([2.0]), "text")


# --- Samples that are wrong -------------------------------------------------------------------------------------


def test_a_sample_of_another_shape_is_named():
    """The message says which sample, what it is and what the others are."""
    items = [(torch.zeros(4), 0)] * 7
    items[5] = (torch.zeros(4, 3), 0)
    with pytest.raises(TrainingError, match=r"sample 5 is \(4x3, int\) and others are \(4, int\)"):
        fetch(items, [3, 5, 6], [0, 1, 2], seed=0)


def test_of_two_samples_the_second_is_the_odd_one():
    """Where two samples differ and nothing tells which is wrong, the answer is the same every time."""
    items = [(torch.zeros(4), 0), (torch.zeros(5), 0)]
    with pytest.raises(TrainingError, match=r"sample 1 is \(5, int\) and others are \(4, int\)"):
        fetch(items, [0, 1], [0, 1], seed=0)


def test_a_mapping_without_a_key_is_named():
    """Mappings must have equal keys."""
    items = [({"a": torch.zeros(1), "b": torch.zeros(1)}, 0)] * 3 + [({"a": torch.zeros(1)}, 0)]
    with pytest.raises(TrainingError, match=r"sample 3 is \(\{a: 1\}, int\) and others are"):
        fetch(items, [0, 1, 3], [0, 1, 2], seed=0)


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (torch.zeros(2), "Tensor"),
        ((1, 2, 3), "tuple of 3"),
        (None, "NoneType"),
        ({"x": 1, "y": 2}, "dict"),
    ],
)
def test_an_item_that_is_no_pair_is_named(item: Any, kind: str):
    """An item must be (input, target)."""
    with pytest.raises(TrainingError, match=rf"sample 1 is a {kind} and not \(input, target\)"):
        fetch([(torch.zeros(2), 0), item], [0, 1], [0, 1], seed=0)


def test_a_tensor_dataset_of_three_is_refused():
    """What the fast path can't cut into input and target is refused with the way out."""
    data = TensorDataset(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    with pytest.raises(
        TrainingError,
        match=r"sample 0 is a tuple of 3 and not(?s:.*)hint: .*\(\(a, b\), target\)",
    ):
        fetch(data, [0], [0], seed=0)


class Broken(Slow):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise FileNotFoundError("img7.png")
        return super().__getitem__(index)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_an_item_that_raises_is_named(loader_workers: int, run_ranks: Any):
    """The index, the first exception and its line are told, the same from a loader worker as without one."""

    def body(context: Any) -> list[str]:
        with pytest.raises(TrainingError) as raised:
            feed(Broken(tensors()), loader_workers=loader_workers, batch=SAMPLES, steps=range(1))
        failure = failure_of(raised.value, rank=0, sign=Heartbeat(1, "input", 0.0))
        return [failure.message, failure.where, failure.trace]

    [[message, where, trace]] = run_ranks(body, 1)
    assert message.startswith("sample 7 of the data can't be read: FileNotFoundError: img7.png")
    assert where.startswith(f"{__file__}:")
    assert trace.startswith("Traceback") and 'raise FileNotFoundError("img7.png")' in trace


# --- Streams ----------------------------------------------------------------------------------------------------


def test_what_a_stream_is():
    """A data set is a stream if it says so or can't be indexed."""
    assert is_stream(Numbers(3))
    assert is_stream(x for x in range(3))
    assert not is_stream([1, 2])
    assert not is_stream(tensors())


@pytest.mark.parametrize(("shares", "num_microbatches"), [((1,), 1), ((1, 1), 2), ((1, 2, 1), 1)])
def test_a_stream_is_used_once_in_its_order(shares: tuple[int, ...], num_microbatches: int):
    """Over any number of ranks each sample of a stream is used once an epoch, in its own order."""
    ranks = [
        feed(
            Numbers(12),
            shares=shares,
            rank=rank,
            num_microbatches=num_microbatches,
            epochs=2,
            steps=range(1000),
        )
        for rank in range(len(shares))
    ]
    used = [
        target
        for parts in zip(*ranks, strict=True)
        for _, batches in parts
        for batch in batches
        for target in batch.target[: batch.samples].tolist()
    ]
    assert used == [*range(12), *range(100, 112)]
    assert [window.count for window, _ in ranks[0]] == [5, 5, 2, 5, 5, 2]


def test_all_ranks_agree_on_the_end_of_a_stream():
    """The last, short window comes to every rank, with a stand-in for those that have nothing in it."""
    ranks = [
        feed(Numbers(11), shares=(1, 1, 1), rank=rank, epochs=1, steps=range(1000))
        for rank in range(3)
    ]
    assert [[window.count for window, _ in windows] for windows in ranks] == [[5, 5, 1]] * 3
    assert [[batch.samples for batch in windows[-1][1]] for windows in ranks] == [[1], [0], [0]]


def test_steps_go_on_over_the_ends_of_a_stream():
    """Without epochs a stream is begun again until the steps are done."""
    assert [window.epoch for window, _ in feed(Numbers(5), steps=range(4))] == [0, 1, 2, 3]


def test_a_stream_is_resumed_at_its_place():
    """A resumed run reads up to its place again and sees what the uninterrupted one saw, random draws too."""
    walked = feed(Numbers(12), epochs=3, steps=range(1000))
    for step in (1, 3, 7):
        windows = feed(Numbers(12), epochs=3, steps=range(step, 1000))
        assert [samples_of(batches) for _, batches in windows] == [
            samples_of(b) for _, b in walked[step:]
        ]
    assert feed(Numbers(12), epochs=1, steps=range(3, 1000)) == []


def test_a_stream_looks_the_same_on_any_rank():
    """What a stream draws at random is the same on every rank, whatever the rank drew in between."""
    alone = [samples_of(batches) for _, batches in feed(Numbers(12), epochs=1, steps=range(9))]
    parts = []
    for rank in range(2):
        order = training_feed(
            job_of(Numbers(12), batch=5, epochs=1),
            order=None,
            part=DataShard((1, 1), rank, 1),
            steps=range(9),
            loader_workers=0,
        )
        samples = []
        for _, batches in order:
            torch.rand(rank + 1)  # dropout, say
            samples.append(samples_of(batches))
        parts.append(samples)
    assert [first + second for first, second in zip(*parts, strict=True)] == alone


def test_drop_last_of_a_stream():
    """The short last batch of a stream is left out too."""
    assert [
        window.count for window, _ in feed(Numbers(12), epochs=2, drop_last=True, steps=range(99))
    ] == [5] * 4


@pytest.mark.parametrize(("count", "drop_last"), [(0, False), (4, True)])
def test_a_stream_that_gives_nothing_is_an_error(count: int, drop_last: bool):
    """A stream without a batch would be read for ever."""
    with pytest.raises(JobError, match=f"the data stream gave {count} samples in epoch 0"):
        feed(Numbers(count), drop_last=drop_last, steps=range(1))


def test_a_generator_has_one_epoch():
    """A generator that is used up is an error in the second epoch and not an endless loop."""
    with pytest.raises(JobError, match="gave 0 samples in epoch 1"):
        feed(((torch.zeros(1), 0) for _ in range(5)), epochs=2, steps=range(99))


def test_loader_workers_of_a_stream_are_refused():
    """Loader workers would each read the whole stream."""
    with pytest.raises(JobError, match=r"iterable data set(?s:.*)--loader-workers 0"):
        feed(Numbers(5), loader_workers=1)


def test_a_wrong_sample_of_a_stream_is_named_by_its_place():
    """A stream's samples are counted from its beginning."""
    items = [(torch.zeros(4), 0)] * 9 + [(torch.zeros(3), 0)]
    with pytest.raises(TrainingError, match=r"sample 9 is \(3, int\)"):
        feed(iter(items), steps=range(2))


# --- Evaluation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [tensors(), Slow(tensors()), Numbers(SAMPLES)], ids=["tensors", "items", "stream"]
)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(("batch", "num_microbatches"), [(5, 1), (22, 2), (3, 1)])
def test_evaluation_counts_every_sample_once(
    data: Any, count: int, batch: int, num_microbatches: int
):
    """Over one to four ranks each sample counts once and all ranks have equally many micro-batches."""
    ranks = [
        list(
            evaluation_feed(
                data, batch=batch, part=DataShard((1,) * count, rank, num_microbatches), seed=0
            )
        )
        for rank in range(count)
    ]
    counted = [
        target for cuts in ranks for cut in cuts for target in cut.target[: cut.samples].tolist()
    ]
    assert sorted(counted) == list(range(SAMPLES))
    assert len({len(cuts) for cuts in ranks}) == 1
    assert all(len(cut.target) == (cut.samples or 1) for cuts in ranks for cut in cuts)


def test_fewer_samples_than_ranks_to_evaluate():
    """One sample on four ranks counts once."""
    data = TensorDataset(torch.zeros(1, 2), torch.zeros(1))
    ranks = [
        list(evaluation_feed(data, batch=8, part=DataShard((1,) * 4, rank, 1), seed=0))
        for rank in range(4)
    ]
    assert [[cut.samples for cut in cuts] for cuts in ranks] == [[1], [0], [0], [0]]


def test_evaluation_is_the_same_every_time():
    """Random draws of the data set are the same in every evaluation, on any number of ranks."""
    alone = samples_of(
        list(evaluation_feed(Augmented(), batch=8, part=DataShard((1,), 0, 1), seed=0))
    )
    ranks = [
        list(evaluation_feed(Augmented(), batch=8, part=DataShard((1, 1), rank, 1), seed=0))
        for rank in range(2)
    ]
    assert sorted(alone) == sorted(row for cuts in ranks for row in samples_of(cuts))
