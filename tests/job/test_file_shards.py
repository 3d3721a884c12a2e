"""Files of samples: each sample once, in an order that knows no ranks, and no rank reads all files."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from later import needed

from paceline.base.errors import JobError, TrainingError
from paceline.job import Job
from paceline.job.order import Order
from paceline.job.shards import Shards, _in_steps, read_tar
from paceline.proof.order import windows
from paceline.training.feed import DataShard, training_feed

SIZES = (5, 9, 7, 3, 8, 8, 6, 2)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Tar files as WebDataset's; sample k holds the number k."""
    numbers = iter(range(sum(SIZES)))
    for shard, size in enumerate(SIZES):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as file:
            for number in islice(numbers, size):
                value = torch.tensor([float(number)]).numpy().tobytes()
                for suffix, content in (("x.bin", value), ("cls", b"%d" % number)):
                    member = tarfile.TarInfo(f"part/{number:03d}.{suffix}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))
    return sorted(tmp_path.glob("*.tar"))


def decode(sample: dict[str, Any]) -> Any:
    assert sample["__key__"] == f"part/{int(sample['cls']):03d}"
    return torch.frombuffer(bytearray(sample["x.bin"]), dtype=torch.float32), int(sample["cls"])


def job(data: Any, **fields: Any) -> Job:
    return Job(
        **{
            "model": torch.nn.Identity,
            "data": data,
            "loss": min,
            "optimizer": torch.optim.SGD,
            "batch": 8,
            "epochs": 2,
            **fields,
        }
    )


def steps_of(
    made: Job, rank: int, ranks: int, *, steps: range, loader_workers: int = 0
) -> list[list[int]]:
    feed = training_feed(
        made,
        order=Order.of(made),
        part=DataShard((1,) * ranks, rank, 1),
        steps=steps,
        loader_workers=loader_workers,
    )
    return [
        [int(t) for batch in batches if batch.samples for t in batch.target] for _, batches in feed
    ]


def test_each_sample_counts_once_on_any_number_of_ranks(paths: list[Path]):
    """Ranks together take each step of one device, from any step on; epochs are all samples in other orders."""

    def made() -> Job:
        return job(Shards(paths, decode=decode, lanes=4))

    total, whole = made().total_steps, steps_of(made(), 0, 1, steps=range(12))
    assert total == 12 and [indices for _, _, indices in islice(windows(made()), 12)] == whole
    first, second = (
        [sample for step in half for sample in step] for half in (whole[:6], whole[6:])
    )
    assert sorted(first) == sorted(second) == list(range(sum(SIZES))) and first != second
    for ranks in (2, 3):
        parts = [steps_of(made(), rank, ranks, steps=range(12)) for rank in range(ranks)]
        assert [list(chain(*step)) for step in zip(*parts, strict=True)] == whole
    assert steps_of(made(), 1, 2, steps=range(7, 12)) == parts_of(whole, 2)[7:]
    assert steps_of(made(), 0, 1, steps=range(3), loader_workers=2) == whole[:3]


def parts_of(whole: list[list[int]], ranks: int) -> list[list[int]]:
    return [step[-(-len(step) // ranks) :] for step in whole]


def test_a_rank_reads_the_files_of_its_lanes(paths: list[Path]):
    """With a batch that lanes divide, no file is read by two ranks while all lanes last, and none twice."""
    opened: dict[int, list[str]] = {}
    for rank in range(2):
        read = opened.setdefault(rank, [])

        def noted(path: Path, read: list[str] = read) -> Iterable[Any]:
            read.append(path.name)
            return read_tar(path)

        steps_of(
            job(Shards(paths, read=noted, decode=decode, lengths=SIZES, lanes=4)),
            rank,
            2,
            steps=range(4),
        )
    assert not set(opened[0]) & set(opened[1])
    assert all(len(set(read)) == len(read) >= 2 for read in opened.values())
    assert set(opened[0]) | set(opened[1]) <= {path.name for path in paths}


def test_the_order_may_be_that_of_the_files(paths: list[Path]):
    """One lane without shuffling is one file after the other."""
    made = job(Shards([str(path) for path in paths], decode=decode, shuffle=False, lanes=1))
    assert list(chain(*steps_of(made, 0, 1, steps=range(6)))) == list(range(sum(SIZES)))


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
def test_files_of_webdataset(paths: list[Path]):
    """Its own reader gives the samples of a file; they are those of the reader here."""
    webdataset = needed("webdataset")

    def read(path: Path) -> Iterator[Any]:
        return iter(webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False))

    reference, shards = Shards(paths, read=read), Shards(paths)
    assert reference.lengths == shards.lengths == list(SIZES)
    for k in (0, 7, 47):
        assert (reference[k]["x.bin"], reference[k]["__key__"]) == (
            shards[k]["x.bin"],
            shards[k]["__key__"],
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda paths: Shards([]), "there are no shards"),
        (lambda paths: Shards("shards/*.tar"), "must be a list of files, got 'shards/"),
        (lambda paths: Shards([*paths, "missing.tar"]), "missing.tar can't be read: No such file"),
        (lambda paths: Shards([__file__]), "test_file_shards.py is no tar file"),
        (lambda paths: Shards(paths, lanes=0), "lanes must be at least 1"),
        (
            lambda paths: Shards(paths, lengths=[1, 2]),
            "lengths has 2 numbers, and there are 8 shards",
        ),
        (lambda paths: Shards(paths, lengths=[0] * 8), "hold no samples"),
        (lambda paths: Shards(paths, read=lambda path: []), "hold no samples"),
    ],
)
def test_shards_that_make_no_sense(paths: list[Path], make: Any, message: str):
    """They are refused when they are made."""
    with pytest.raises(JobError, match=message):
        make(paths)


def test_a_file_with_another_number_of_samples(paths: list[Path]):
    """It is named, with both numbers."""
    made = job(Shards(paths, decode=decode, lengths=[4, *SIZES[1:]], shuffle=False))
    with pytest.raises(
        (JobError, TrainingError),
        match=r"0\.tar has 5 samples, and it was said or counted to have 4",
    ):
        steps_of(made, 0, 1, steps=range(1))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 15))
def test_steps_hold_each_sample_once(sizes: list[int], batch: int):
    """However unequal lanes are, steps are full until the samples end, and take equally from lanes that last."""
    lanes = [[(lane, k) for k in range(size)] for lane, size in enumerate(sizes)]
    order: list[Any] = list(_in_steps(lanes, batch))  # type: ignore[arg-type]
    assert sorted(order) == [sample for lane in lanes for sample in lane]
    assert all(
        [k for lane, k in order if lane == number] == list(range(size))
        for number, size in enumerate(sizes)
    )
    if sum(sizes) >= batch and all(size >= batch for size in sizes):
        counts = [sum(lane == number for lane, _ in order[:batch]) for number in range(len(sizes))]
        assert max(counts) - min(counts) <= 1
