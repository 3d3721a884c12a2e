"""Data as scripts have it: DataLoaders, Hugging Face data sets, arrays and weights become the fields that they mean."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from later import needed
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import paceline
from paceline.base.errors import JobError
from paceline.job import Job
from paceline.job.arrays import Arrays
from paceline.job.groups import GroupSizes
from paceline.job.loaders import Loading
from paceline.job.order import Order
from paceline.proof.order import order_difference, whole_batches, windows
from paceline.training.feed import DataShard, is_stream, training_feed

X, Y = torch.arange(40.0).view(20, 2), torch.arange(20)
SET = TensorDataset(X, Y)


def job(**fields: Any) -> Job:
    given = {
        "model": lambda: torch.nn.Linear(2, 3),
        "loss": lambda o, t: o.sum() / len(o),
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "steps": 7,
    }
    return Job(**{**given, **fields})


def refusal(**fields: Any) -> str:
    with pytest.raises(JobError) as caught:
        job(**fields)
    return str(caught.value)


def read(made: Job, *, ranks: int = 1, loader_workers: int = 0) -> list[list[int]]:
    """The targets of each step, as ranks get them together."""
    order, steps = None if is_stream(made.data) else Order.of(made), range(made.steps or 1)
    parts = [
        list(
            training_feed(
                made,
                order=order,
                part=DataShard((1,) * ranks, rank, 1),
                steps=steps,
                loader_workers=loader_workers,
            )
        )
        for rank in range(ranks)
    ]
    return [
        [int(t) for part in parts for batch in part[step][1] if batch.samples for t in batch.target]
        for step in range(len(parts[0]))
    ]


def paired(samples: list[Any]) -> Any:
    return default_collate(samples)


# --- DataLoaders ---------------------------------------------------------------------------------------------------


def test_a_shuffling_loader_is_a_jobs_own_order():
    """Its data set, batch size, short batch, collate function and workers are taken; a second look changes nothing."""
    made = job(
        data=DataLoader(
            SET,
            batch_size=6,
            shuffle=True,
            drop_last=True,
            collate_fn=paired,
            num_workers=2,
            prefetch_factor=3,
            generator=torch.Generator().manual_seed(5),
        )
    )
    assert (made.data, made.batch, made.drop_last, made.collate) == (SET, 6, True, paired)
    assert made.sampler is None and made.loading == Loading(2, None, 3)
    assert replace(made, seed=1) == replace(replace(made, seed=1))
    plain = job(data=SET, batch=6, drop_last=True, collate=paired)
    assert read(made) == read(plain) == read(made, ranks=3)
    assert plain.loading is None


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler(torch.arange(1.0, 21.0), 13),
        RandomSampler(SET, replacement=True),
        RandomSampler(SET, num_samples=7),
        SubsetRandomSampler([1, 5, 6]),
    ],
    ids=lambda s: f"{type(s).__name__}-{len(s)}",
)
def test_a_loaders_sampler_is_the_jobs(sampler: Any):
    """It draws the same for the engine, on any number of ranks, and for the proof."""
    made = job(data=DataLoader(SET, batch_size=4, sampler=sampler))
    assert made.sampler is sampler and made.num_samples == len(sampler)
    assert (
        read(made) == read(made, ranks=3) == [indices for _, _, indices in islice(windows(made), 7)]
    )


def test_a_loader_in_the_samples_own_order():
    """Without shuffle the samples come as they are, in every epoch."""
    made = job(data=DataLoader(SET, batch_size=15))
    assert type(made.sampler) is SequentialSampler
    assert read(made)[:4] == [list(range(15)), list(range(15, 20))] * 2


class ByLength(BatchSampler):
    """Groups of neighbours, in another order each epoch: as those that group samples by length."""

    def __init__(self, size: int, sizes: tuple[int, ...] = ()) -> None:
        self.size, self.sizes = size, sizes

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[list[int]]:
        ends = np.cumsum([0, *self.sizes]) if self.sizes else [*range(0, 20, self.size), 20]
        groups = [list(range(first, last)) for first, last in pairwise(ends)]
        whole = groups if len(groups[-1]) == self.size else groups[:-1]
        random.shuffle(whole)
        yield from whole if self.sizes or len(groups[-1]) == self.size else [*whole, groups[-1]]


@pytest.mark.parametrize("size", [5, 6])
def test_groups_of_a_batch_sampler_are_steps(size: int):
    """Each step is one group, drawn once for all ranks, in another order each epoch, from any step on."""
    made = job(data=DataLoader(SET, batch_sampler=ByLength(size)))
    assert made.batch == size and made.num_samples == 20
    steps = read(made)
    assert steps == read(made, ranks=2) == [indices for _, _, indices in islice(windows(made), 7)]
    assert all(
        step == list(range(step[0], step[0] + len(step))) and step[0] % size == 0 for step in steps
    )
    assert steps[:3] != steps[4:]
    order = Order.of(made)
    window = order.window(6)
    assert order.indices(window.epoch, window.positions) == steps[6]


class Budget:
    """Groups of at most so many tokens, of samples that chance puts near each other: their sizes and their number
    differ by epoch."""

    def __init__(self, tokens: int = 40) -> None:
        self.tokens = tokens

    def __iter__(self) -> Iterator[list[int]]:
        groups, longest = [list[int]()], 0
        for index in sorted(range(20), key=lambda index: index + 8 * random.random()):
            longest = max(longest, 3 + index)
            if groups[-1] and longest * (len(groups[-1]) + 1) > self.tokens:
                groups, longest = [*groups, []], 3 + index
            groups[-1].append(index)
        random.shuffle(groups)
        return iter(groups)


@pytest.mark.parametrize(
    "fields",
    [{"data": DataLoader(SET, batch_sampler=Budget())}, {"data": SET, "sampler": Budget()}],
)
def test_groups_of_any_size_are_steps(fields: dict[str, Any]):
    """Each step is a group whose size differs from others', drawn once for any number of ranks and from any step on;
    an epoch has as many steps as it has groups."""
    made = job(**fields, steps=None, epochs=4)
    assert (
        isinstance(made.batch, GroupSizes)
        and made.total_steps is not None
        and made.num_samples == 20
    )
    expected = list(islice(windows(made), made.total_steps))
    per_epoch = [sum(epoch == each for epoch, _, _ in expected) for each in range(4)]
    assert len(set(per_epoch)) > 1 and len({len(indices) for _, _, indices in expected}) > 2
    assert all(
        sorted(i for epoch, _, indices in expected if epoch == each for i in indices)
        == list(range(20))
        for each in range(4)
    )
    made = replace(made, steps=made.total_steps, epochs=None)
    assert read(made) == read(made, ranks=3) == [indices for _, _, indices in expected]
    order = Order.of(replace(made, data=made.data, precision="float64"))
    for step in (made.total_steps - 1, 0, per_epoch[0]):  # as a resumed run asks
        window = order.window(step)
        assert (window.epoch, order.indices(window.epoch, window.positions)) == (
            expected[step][0],
            expected[step][2],
        )
    assert [order.ends_epoch(sum(per_epoch[:n])) for n in range(5)] == [
        False,
        True,
        True,
        True,
        True,
    ]
    assert order.fewest(made.total_steps) == min(len(indices) for _, _, indices in expected)
    assert order_difference(made, steps=9) is None
    other = replace(made, seed=1)
    assert read(other) != read(made) and read(other, ranks=2) == read(other)
    assert replace(made, sampler=None).batch == int(made.batch)


def test_what_groups_cannot_be():
    """A batch sampler says the batch, and draws for all ranks, the same each time."""
    for batch, shown in ((4, "batch is 4"), (paceline.by_step({0: 2, 3: 5}), "batch is in phases")):
        for fields in (
            {"data": DataLoader(SET, batch_sampler=Budget())},
            {"data": SET, "sampler": Budget()},
        ):
            assert f"{shown}, and the batch sampler draws" in refusal(batch=batch, **fields)
    assert "drop_last leaves out a short last batch" in refusal(
        data=SET, sampler=Budget(), drop_last=True
    )
    assert "batch is 5, and the sampler draws batches of 4" in refusal(
        data=SET, batch=5, sampler=BatchSampler(SequentialSampler(SET), 4, drop_last=False)
    )
    part = Budget()
    part.num_replicas = 2  # type: ignore[attr-defined]
    assert "the batch sampler Budget draws one rank's part" in refusal(data=SET, sampler=part)
    for groups, shown in (([[1], []], r"drew \[\] as group 1"), ([[1], 2], "drew 2 as group 1")):
        with pytest.raises(JobError, match=shown):
            job(data=SET, sampler=groups)
    drawn = iter(range(100))
    unstable = type(
        "Unstable", (Budget,), {"__iter__": lambda self: iter([[next(drawn) % 20], [1, 2]])}
    )()
    with pytest.raises(JobError, match="the batch sampler Unstable drew other samples"):
        read(job(data=SET, sampler=unstable))


def test_a_batch_sampler_that_only_cuts_is_its_sampler():
    """BatchSampler over a sampler says no more than the loader's own arguments."""
    sampler = WeightedRandomSampler(torch.ones(20), 9)
    made = job(data=DataLoader(SET, batch_sampler=BatchSampler(sampler, 4, drop_last=True)))
    assert (made.sampler, made.batch, made.drop_last) == (sampler, 4, True)


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(X[i], Y[i]) for i in range(20)])


def test_a_loader_over_a_stream():
    """It is the stream in batches."""
    made = job(data=DataLoader(Numbers(), batch_size=8), steps=None, epochs=1)
    assert is_stream(made.data) and made.batch == 8
    assert read(replace(made, steps=3, epochs=None)) == [
        list(range(8)),
        list(range(8, 16)),
        list(range(16, 20)),
    ]


class Halved(DataLoader):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return islice(super().__iter__(), 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"data": DataLoader(SET, 4), "batch": 5},
            "batch is given, and data is a DataLoader that has its own: 5 and 4",
        ),
        (
            {"data": DataLoader(SET, 4), "sampler": RandomSampler(SET)},
            "sampler is given, and data is a DataLoader",
        ),
        (
            {"data": DataLoader(SET, 4, collate_fn=paired), "collate": list},
            "collate is given, and data is a DataLoader",
        ),
        (
            {"data": DataLoader(SET, batch_size=None)},
            "batch_size=None: its data set makes whole batches",
        ),
        ({"data": DataLoader(Numbers(), batch_size=None)}, "batch_size=None"),
        (
            {"data": DataLoader(Numbers(), batch_size=4, num_workers=2)},
            "num_workers=2: each worker reads a stream",
        ),
        ({"data": Halved(SET, batch_size=4)}, "the Halved has an __iter__ of its own"),
        (
            {"data": SET, "batch": 4, "validation": DataLoader(SET, 6, drop_last=True)},
            "leaves out 2 samples",
        ),
        (
            {"data": SET, "batch": 4, "validation": DataLoader(SET, batch_sampler=ByLength(5))},
            "sees every sample once",
        ),
        (
            {
                "data": SET,
                "batch": 4,
                "test": DataLoader(SET, 4, sampler=WeightedRandomSampler([1.0] * 20, 20)),
            },
            "test is a DataLoader with a WeightedRandomSampler",
        ),
        (
            {"data": DataLoader(SET, 4, sampler=torch.utils.data.DistributedSampler(SET, 2, 0))},
            "draws one rank's part",
        ),
        ({"data": SET}, "batch must be a whole number of at least 1, got None"),
    ],
)
def test_what_contradicts_or_cannot_be_kept(fields: dict[str, Any], message: str):
    """The field and the way out are named when the job is made."""
    assert message in refusal(**fields)


def test_loaders_of_evaluation_data():
    """Their data set is evaluated, each sample once, with their own collate function; a subset's samples alone."""
    made = job(
        data=DataLoader(SET, 4, collate_fn=paired),
        validation=DataLoader(SET, 7),
        test=DataLoader(SET, 7, sampler=SubsetRandomSampler([3, 1])),
    )
    assert made.validation is SET and made.evaluation_collate is default_collate
    assert type(made.test) is Subset and sorted(made.test.indices) == [1, 3]
    same = job(
        data=DataLoader(SET, 4, collate_fn=paired),
        validation=DataLoader(SET, 7, shuffle=True, collate_fn=paired),
    )
    assert same.validation_collate is None and same.evaluation_collate is paired
    assert job(data=SET, batch=4, validation=DataLoader(SET, 20, drop_last=True)).validation is SET


class Lazy(Dataset[Any]):
    """Its items have what the worker's init wrote."""

    mark = -1

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return X[index], self.mark


def mark(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.mark = 100 + worker  # type: ignore[union-attr]


def test_workers_are_set_up_as_the_loader_says():
    """worker_init_fn runs in each worker, on the job's own data set."""
    made = job(data=DataLoader(Lazy(), batch_size=5, num_workers=2, worker_init_fn=mark), steps=4)
    assert {target for step in read(made, loader_workers=2) for target in step} == {100, 101}
    assert {target for step in read(made) for target in step} == {-1}


class OpenedInWorkers(Dataset[Any]):
    """Its file is there once the worker's init has opened it."""

    file: Any = None

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        self.file.seek(index)
        return X[index] + torch.rand(2), self.file.read(1)[0] % 2


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "tensor=2"])
def test_what_worker_init_fn_opens_is_open_to_who_else_reads(plan: str, tmp_path: Path):
    """Ranks read samples too: they evaluate, and look at the first ones. They draw as if it had been open."""
    (tmp_path / "bytes").write_bytes(bytes(range(20)))

    def open_file(worker: int) -> None:
        np.random.seed(worker)
        torch.rand(1)
        dataset: Any = torch.utils.data.get_worker_info().dataset  # type: ignore[union-attr]
        dataset.file = open(tmp_path / "bytes", "rb")  # noqa: SIM115  # until the process ends

    def trained(name: str, data: Any, **loading: Any) -> Any:
        loader = DataLoader(data, batch_size=8, shuffle=True, **loading)
        made = job(
            model=lambda: torch.nn.Linear(2, 2),
            loss=torch.nn.functional.cross_entropy,
            data=loader,
            epochs=1,
            steps=None,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            precision="float64",
            validation=DataLoader(data, batch_size=8, **loading),
        )
        return paceline.train(made, plan=plan, run=tmp_path / name, table=False)

    lazy = trained("lazy", OpenedInWorkers(), num_workers=1, worker_init_fn=open_file)
    with open(tmp_path / "bytes", "rb") as file:
        data = OpenedInWorkers()
        data.file = file
        opened = trained("opened", data)
    assert (
        lazy.metrics == pytest.approx(opened.metrics, rel=1e-12)
        and "validation_loss" in lazy.metrics
    )
    for name, weight in opened.model().state_dict().items():
        torch.testing.assert_close(lazy.model().state_dict()[name], weight, rtol=0, atol=1e-12)


def test_loader_workers_under_a_long_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The sockets over which workers send batches have shorter names than files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 150)))
    Path(tempfile.gettempdir()).mkdir()
    made = job(
        data=[(X[i], X[i]) for i in range(20)],
        batch=8,
        steps=2,
        model=lambda: torch.nn.Linear(2, 2),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    result = paceline.train(
        made,
        plan="single",
        run=tmp_path / "run",
        loader_workers=1,
        timeout_s=30,
        restarts=0,
        table=False,
    )
    assert result.history[-1]["step"] == 2


class Filtered(DataLoader):  # type: ignore[type-arg]
    """As torch_geometric's loaders of neighbours, which make batches of what collate_fn made."""

    def _get_iterator(self) -> Any:
        return map(default_collate, super()._get_iterator())


def test_a_loader_that_changes_its_batches_is_refused():
    assert "the Filtered changes what its collate_fn made" in refusal(
        data=Filtered(SET, batch_size=4)
    )


@pytest.mark.parametrize("plan", ["data=2", "shard=2"])
def test_graphs_of_torch_geometric(plan: str, tmp_path: Path):
    """Its DataLoader and its data sets in memory, under plans that cut the batch, give one device's weights."""
    data, loader = needed("torch_geometric.data"), needed("torch_geometric.loader")
    nn = needed("torch_geometric.nn")

    class Graphs(data.InMemoryDataset):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(None)
            self.data, self.slices = self.collate(
                [
                    data.Data(
                        x=X[: 3 + i % 3] + i,
                        y=Y[i : i + 1] % 3,
                        edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]),
                    )
                    for i in range(18)
                ]
            )

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.GCNConv(2, 4), torch.nn.Linear(4, 3)

        def forward(self, graphs: Any) -> Tensor:
            return self.out(
                nn.global_mean_pool(self.layer(graphs.x, graphs.edge_index).tanh(), graphs.batch)
            )

    def trained(plan: str) -> Any:
        made = job(
            model=Net,
            loss=lambda output, graphs: torch.nn.functional.cross_entropy(output, graphs.y),
            data=loader.DataLoader(Graphs(), batch_size=8, shuffle=True),
            precision="float64",
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            steps=3,
        )
        return (
            paceline.train(made, plan=plan, run=tmp_path / plan, table=False).model().state_dict()
        )

    expected = trained("single")
    for name, weight in trained(plan).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-12)


# --- Arrays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        (X.numpy().astype(float), Y.numpy()),
        ({"a": X, "b": X}, Y),
        ((X, X), Y),
        {"a": X, "y": Y},
        X,
        X.numpy(),
    ],
    ids=["tensors", "numpy", "float64", "named", "two", "mapping", "x", "numpy x"],
)
def test_samples_are_rows_of_arrays(data: Any):
    """A batch that is gathered is the one that samples make; memory is shared, and float64 of numpy becomes float32."""
    made = job(data=data, batch=6)
    assert isinstance(made.data, Arrays) and made.num_samples == 20
    assert replace(made).data is made.data
    gathered = next(
        training_feed(
            made, order=Order.of(made), part=DataShard((1,), 0, 1), steps=range(1), loader_workers=0
        )
    )[1][0]
    stacked = next(iter(whole_batches(made, 1)))
    torch.testing.assert_close(gathered.input, stacked.input, rtol=0, atol=0)
    torch.testing.assert_close(gathered.target, stacked.target, rtol=0, atol=0)
    assert (gathered.target is gathered.input) == (not isinstance(data, tuple))
    first = made.data.tensors
    while isinstance(first, tuple | dict):
        first = first[0] if isinstance(first, tuple) else first["a"]
    assert first.dtype == torch.float32


def test_arrays_are_not_copied(tmp_path: Any):
    """Tensors, arrays, and memory-mapped files that can't be written share their memory."""
    array = X.numpy().copy()
    assert job(data=(array, Y), batch=2).data.tensors[0].data_ptr() == array.ctypes.data
    np.save(tmp_path / "x.npy", array)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert job(data=(mapped, Y), batch=2).data.tensors[0].data_ptr() == mapped.ctypes.data


def test_frames_of_pandas():
    """Columns are the input's numbers, and a series is a target."""
    pandas = needed("pandas")
    frame = pandas.DataFrame({"a": X[:, 0].numpy(), "b": X[:, 1].numpy(), "y": Y.numpy()})
    tensors = job(data=(frame[["a", "b"]], frame["y"]), batch=2).data.tensors
    assert torch.equal(tensors[0], X) and torch.equal(tensors[1], Y)

    mixed = pandas.DataFrame({"a": [1, 2], "b": [0.5, 1.0], "c": [True, False]})
    numbers = torch.tensor([[1, 0.5, 1], [2, 1, 0]])
    for given in (mixed, mixed.convert_dtypes()):  # pandas' own types can miss values
        assert torch.equal(job(data=given, batch=2).data.tensors, numbers)
    ids = pandas.DataFrame({"a": [1, 2], "b": [3, 4]}, dtype="Int64")
    assert torch.equal(job(data=ids, batch=2).data.tensors, torch.tensor([[1, 3], [2, 4]]))
    missing = job(data=pandas.DataFrame({"a": [1, None]}, dtype="Int64"), batch=2).data.tensors
    assert torch.equal(missing.isnan(), torch.tensor([[False], [True]]))
    assert "columns that are no numbers: 'd' (" in refusal(data=mixed.assign(d=["x", "y"]), batch=2)


class InFile:
    """As an array of h5py or zarr: rows are read when they are asked for."""

    shape, dtype = (20, 2), np.dtype("float32")

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        assert isinstance(index, int), "whole files are not read"
        return X[index].numpy()


def test_arrays_in_files_are_read_row_by_row():
    """They stay where they are, beside labels in memory."""
    made = job(data=(InFile(), Y.tolist()), batch=5)
    assert not made.data.is_in_memory and read(made) == read(job(data=(X, Y), batch=5))


def test_lists_of_labels_beside_arrays():
    """A list by an array is its labels; with another length, or alone in a mapping, it is refused by name."""
    assert torch.equal(job(data=(X, Y.tolist()), batch=5).data.tensors[1], Y)
    assert torch.equal(job(data={"x": X, "y": Y.tolist()}, batch=5).data.tensors["y"], Y)
    assert "'y' in it is no array along dim 0" in refusal(data={"x": X, "y": ["a"] * 20}, batch=5)


def test_what_is_no_arrays_stays_a_sequence():
    """Lists and tuples of samples are what they were."""
    for data in ([X[0], X[1]], [(X[0], Y[0])], ((X[0], Y[0]), (X[1], Y[1])), [X, Y]):
        assert job(data=data, batch=1).data is data


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": (X, Y[:3])}, "data holds arrays of 20, 3 samples"),
        (
            {"data": (X, Y), "validation": {"x": X, "y": Y[1:]}},
            "validation holds arrays of 20, 19 samples",
        ),
        (
            {"data": (np.array(["a", "b"]), np.arange(2))},
            "data holds an array of <U1, which is no type of numbers",
        ),
        ({"data": (np.array([{}, {}]), np.arange(2))}, "an array of object"),
    ],
)
def test_arrays_that_are_no_data(fields: dict[str, Any], message: str):
    """Lengths and types are named."""
    assert message in refusal(batch=2, **fields)


# --- Weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weights", [[0.0] * 10 + [1.0] * 10, torch.cat([torch.zeros(10), torch.ones(10)])]
)
def test_weights_are_chances_to_be_drawn(weights: Any):
    """As WeightedRandomSampler draws: with replacement, as many as there are, never a sample of weight 0."""
    made = replace(job(data=(X, Y), batch=5, sample_weights=weights), seed=2)
    assert isinstance(made.sampler, WeightedRandomSampler) and made.sample_weights is None
    drawn = [target for step in read(made) for target in step]
    assert min(drawn) >= 10 and len(set(drawn)) < len(drawn)
    assert read(made) == read(made, ranks=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sample_weights": [1.0] * 3}, "sample_weights has 3 numbers, and data has 20 samples"),
        (
            {"sample_weights": [1.0] * 20, "sampler": RandomSampler(SET)},
            "weights draws the samples, and so does the sampler",
        ),
        ({"sample_weights": [0.0] * 20}, "not all 0"),
        ({"sample_weights": [-1.0] + [1.0] * 19}, "at least 0"),
        ({"sample_weights": 3}, "a number for each sample"),
        ({"sample_weights": [1.0], "data": Numbers()}, "data that has a length"),
    ],
)
def test_weights_that_make_no_sense(fields: dict[str, Any], message: str):
    """They are refused when the job is made."""
    assert message in refusal(**{"data": SET, "batch": 4, **fields})


# --- Hugging Face --------------------------------------------------------------------------------------------------


def test_a_data_set_of_hugging_face():
    """Its items become tensors, unless it has a format or the job collates; splits are named; a stream is a stream."""
    datasets = needed("datasets")
    rows = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
    made = job(data=rows, batch=6)
    batch = next(iter(whole_batches(made, 1)))
    assert batch.input["x"].shape == (6, 2) and torch.equal(
        batch.input["x"], X[batch.target["label"]]
    )
    assert replace(made).data is made.data
    assert job(data=rows, batch=6, collate=list).data is rows
    numbers = rows.with_format("numpy")
    assert job(data=numbers, batch=6).data is numbers
    loader = job(data=DataLoader(rows.with_format("torch"), batch_size=6, shuffle=True))
    assert torch.equal(next(iter(whole_batches(loader, 1))).input["x"], batch.input["x"])
    splits = datasets.DatasetDict({"train": rows, "test": rows})
    assert "a DatasetDict with the splits train, test" in refusal(data=splits, batch=6)
    assert "data=dataset['train']" in refusal(data=splits, batch=6)
    stream = job(data=rows.to_iterable_dataset(), batch=6)
    assert is_stream(stream.data)
    assert next(iter(whole_batches(stream, 1))).input["x"].shape == (6, 2)


# --- Together ------------------------------------------------------------------------------------------------------


def unequal(samples: list[tuple[Tensor, Tensor]]) -> Any:
    """Padded to the longest of a micro-batch, with zeros that the model does not see."""
    inputs = torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return inputs, torch.stack([y for _, y in samples])


class Summed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)).sum(1)


def test_a_loader_under_plans_computes_what_one_device_does():
    """Unequal samples, a weighted sampler and a short last batch, as a script's two loaders have them."""
    generator = torch.Generator().manual_seed(0)
    samples = [
        (torch.randn(1 + i % 4, 3, generator=generator), torch.randn(2, generator=generator))
        for i in range(23)
    ]
    made = Job(
        model=Summed,
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, 0.01),
        data=DataLoader(
            samples,
            batch_size=6,
            collate_fn=unequal,  # type: ignore[arg-type]
            sampler=WeightedRandomSampler(torch.arange(1.0, 24.0), 23),
        ),
        validation=DataLoader(samples, batch_size=4, collate_fn=unequal),
        steps=5,
    )  # type: ignore[arg-type]
    certificates = paceline.verify(made, ["data=3", "shard=2 microbatches=2"], steps=5)
    assert [each.verdict for each in certificates] == ["passed", "passed"], [
        each.reason for each in certificates
    ]
