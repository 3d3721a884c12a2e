"""An error of the job's own code names the sample and shows the job's lines alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.base.errors import TrainingError
from paceline.job.batches import collated
from paceline.launch.process.failure import RankFailed, failure_of
from paceline.launch.process.heartbeats import Heartbeat
from paceline.training.blame import note_sample

X, Y = torch.arange(80.0).reshape(20, 4) / 80, torch.arange(20) % 3
TOKENS = torch.arange(60).reshape(20, 3) % 10


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.embedding(tokens).mean(1))


def with_one(values: torch.Tensor, index: int, value: int) -> torch.Tensor:
    changed = values.clone()
    changed[index] = value
    return changed


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("data", "model", "named", "own_line"),
    [
        (
            (X, with_one(Y, 7, 9)),
            lambda: nn.Linear(4, 3),
            "the loss fails on sample 7 of the data by itself: its target is 9",
            None,
        ),
        (
            (with_one(TOKENS, 7, 12), Y),
            Embedded,
            "index out of range",
            "self.head(self.embedding(tokens)",
        ),
    ],
)
def test_a_sample_that_the_job_fails_on(
    data: Any, model: Any, named: str, own_line: str | None, tmp_path: Path
):
    """A label or a token out of range: the index, the rank, and no frame of ours."""
    job = pl.Job(
        model=model,
        data=data,
        loss=F.cross_entropy,
        batch=4,
        epochs=1,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    with pytest.raises(RankFailed) as failed:
        pl.train(job, "data=2", check=False, run=tmp_path / "run")
    text = str(failed.value)
    assert (
        named in text
        and "of this rank, of the samples" in text
        and "7" in text.split("of the samples")[1]
    )
    assert ("Traceback (most recent call last, your code only)" in text) == bool(own_line)
    assert "src/paceline" not in text and (own_line is None or own_line in text)


def test_a_sample_that_collate_fails_on():
    """The one of the batch that it fails on, and its lines."""

    def collate(samples: list[Any]) -> Any:
        return torch.stack([sample["x"] for sample in samples])

    with pytest.raises(TrainingError, match="collate failed on sample 8: KeyError: 'x'") as failed:
        collated([{"x": X[0]}, {"y": X[0]}, {"x": X[1]}], collate, names=[4, 8, 6])
    report = failure_of(failed.value, rank=1, sign=Heartbeat(0, "input", 0.0)).describe()
    assert 'sample["x"] for sample in samples' in report and "src/paceline" not in report


@pytest.mark.parametrize("output", [{"x": X[:3, :3]}, X[:2, :3], "none", X.sum()])
def test_no_sample_is_named_where_it_is_not_known(output: Any):
    """An output that is not one row a sample, and a loss that fails on any."""

    def loss(output: Any, target: Any) -> Any:
        raise KeyError("any") if len(target) == 3 else ValueError

    error = KeyError("any")
    note_sample(error, loss, output, Y[:3], [4, 5, 6])
    assert not getattr(error, "__notes__", [])
