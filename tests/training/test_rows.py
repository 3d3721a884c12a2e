"""Samples that are rows of tensors and arrays: a batch is taken at once, and is the one that torch's loader makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

from paceline.job.arrays import as_arrays, rows_of
from paceline.training.feed import fetch

ROWS = 9
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
KINDS = ["?", "u1", "i2", "u2", "i4", "u4", "i8", "f2", "f4", "f8", "c8"]


@st.composite
def layouts(draw: st.DrawFn, values: Any) -> Any:
    """Rows of some shape out of 1200 values: contiguous, transposed, strided, repeated, channels last."""
    shape = draw(st.sampled_from([(), (3,), (0,), (2, 3), (3, 2, 2)]))
    rows = values[: ROWS * int(np.prod(shape))].reshape(ROWS, *shape)
    change = draw(st.sampled_from(["none", "transposed", "strided", "repeated", "last"]))
    if change == "transposed" and len(shape) > 1:
        return rows.swapaxes(1, 2)
    if change == "strided":
        return values[: 2 * ROWS * (shape or (1,))[0]][::2].reshape(ROWS, *shape[:1])
    if change == "repeated" and isinstance(rows, torch.Tensor):
        return rows[:1].expand_as(rows)
    if change == "last" and len(shape) == 3 and isinstance(rows, torch.Tensor):
        return rows.to(memory_format=torch.channels_last)
    return rows


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = (100 * torch.rand(1200, generator=generator)).to(draw(st.sampled_from(DTYPES)))
    return draw(layouts(values))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(draw(st.integers(0, 99))).uniform(0, 100, 1200)
    return draw(layouts(values.astype(draw(st.sampled_from(KINDS)))))


@st.composite
def data_sets(draw: st.DrawFn) -> Any:
    """Data sets whose samples are rows, of which some are subsets."""
    rows = st.one_of(tensors(), arrays())
    kind = draw(st.sampled_from(["tensors", "tuple", "mapping", "nested", "alone", "array"]))
    data: Any
    if kind == "tensors":
        data = TensorDataset(*draw(st.lists(tensors(), min_size=1, max_size=2)))
    elif kind == "tuple":
        data = StackDataset(draw(rows), draw(rows))
    elif kind == "mapping":
        data = StackDataset(x=draw(rows), y=draw(rows))
    elif kind == "nested":
        data = StackDataset(StackDataset(a=draw(rows), b=draw(rows)), draw(rows))
    else:
        data = draw(tensors() if kind == "alone" else arrays())
    for _ in range(draw(st.integers(0, 2))):
        data = Subset(data, draw(st.permutations(range(len(data)))))
    return data


class OneByOne(Dataset[Any]):
    """The samples of a data set, of which nothing else is known."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def assert_same(one: Any, other: Any) -> None:
    """Bitwise, with the layout in memory."""
    if isinstance(one, Mapping):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if not isinstance(one, torch.Tensor):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
        return
    assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    assert torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in (one, other)))


@pytest.mark.slow
@given(data=data_sets(), places=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=12))
def test_rows_at_once_are_the_samples_one_by_one(data: Any, places: list[int]):
    """Types, shapes, layouts and bits are those of samples that are read and stacked one by one."""
    inner = data
    while type(inner) is Subset:
        inner = inner.dataset
    assert rows_of(inner) is not None
    assert_same(fetch(data, places, places, seed=0), fetch(OneByOne(data), places, places, seed=0))


@given(x=tensors(), y=tensors(), places=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=9))
def test_a_batch_is_that_of_torchs_loader(x: torch.Tensor, y: torch.Tensor, places: list[int]):
    """So it is for arrays that a job was given, whose floats of NumPy are float32."""
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=len(places), sampler=places)
    for data in (TensorDataset(x, y), as_arrays((x, y), name="data")):
        assert_same(fetch(data, places, places, seed=0), next(iter(loader)))


def test_no_sample_is_read_by_itself(monkeypatch: pytest.MonkeyPatch):
    """Neither by a TensorDataset nor by parts of one."""
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    first, _ = random_split(data, [6, 2])
    monkeypatch.delattr(TensorDataset, "__getitem__")
    for each in (data, first, Subset(first, [0, 3])):
        inputs, targets = fetch(each, [1, 0], [1, 0], seed=0)
        assert inputs.tolist() == targets.tolist() and len(inputs) == 2


class Doubled(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "data",
    [
        Doubled(torch.arange(4.0), torch.arange(4)),
        TensorDataset(torch.arange(8.0)[::2].as_subclass(Marked), torch.arange(4)),
        StackDataset([0, 2, 4, 6], torch.arange(4)),
        StackDataset(np.arange(8)[::-2], torch.arange(4)),
        StackDataset(np.arange(4, dtype=">i4"), torch.arange(4)),
        StackDataset(np.zeros(4, [("id", "i1"), ("value", "f4")])["value"], torch.arange(4)),
    ],
)
def test_other_data_is_read_by_samples(data: Any):
    """A subclass may change its samples, and not every array is a tensor."""
    assert rows_of(data) is None
    if not isinstance(data, StackDataset) or not isinstance(data.datasets[0], np.ndarray):
        assert fetch(data, [1, 2], [1, 2], seed=0)[0].tolist() == [2, 4]


def test_a_collate_function_gets_samples():
    """What it is given are the data set's own items."""
    seen: list[Any] = []

    def collate(items: list[Any]) -> Any:
        seen.extend(items)
        return torch.stack([item[0] for item in items]), torch.zeros(len(items))

    fetch(TensorDataset(torch.arange(4.0), torch.arange(4)), [2], [0], seed=0, collate=collate)
    assert len(seen) == 1 and isinstance(seen[0], tuple)


class Whole:
    """What a loop's loader yields as the input, of samples or of what torch has stacked of them."""

    def __call__(self, items: list[Any]) -> Any:
        return self.of_stacked(default_collate(items))

    def of_stacked(self, batch: Any) -> Any:
        return (batch,), None


def test_a_collate_function_may_take_what_torch_has_stacked(monkeypatch: pytest.MonkeyPatch):
    """It then gets rows at once, of data sets with any number of tensors, and samples of others."""
    data = TensorDataset(torch.arange(8.0), torch.arange(8), torch.ones(8, 2))
    one_by_one = fetch(OneByOne(data), [3, 1], [3, 1], seed=0, collate=Whole())
    monkeypatch.delattr(TensorDataset, "__getitem__")
    (batch,), target = fetch(data, [3, 1], [3, 1], seed=0, collate=Whole())
    assert type(batch) is list and target is None
    assert_same(batch, one_by_one[0][0])


def test_a_negative_index_of_a_subset_counts_from_the_end():
    """As it does where samples are read one by one; a wrong one is told with its number."""
    data = TensorDataset(torch.arange(4.0), torch.arange(4))
    assert fetch(Subset(data, [-1, 0]), [0, 1], [0, 1], seed=0)[1].tolist() == [3, 0]
    with pytest.raises(Exception, match="sample 9 of the data can't be read"):
        fetch(Subset(data, [9]), [0], [0], seed=0)
