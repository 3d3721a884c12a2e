"""What couples the samples of a batch is found on one device and named with what helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jobs.classification import classification_job, tagging_job
from jobs.perceptrons import ListedPerceptron
from torch import Tensor, nn

import paceline
from paceline.model.randomness import WithoutRandomness
from paceline.proof.problems import Problem, job_problem


def problem(job: paceline.Job) -> Problem | None:
    with WithoutRandomness() as random:
        return job_problem(replace(job, model=random.building(job.model)), steps=2)


class Centred(nn.Module):
    """Takes the mean of the batch away, deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(6, 5), Centre())})
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body["inner"](x))


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Counting(nn.Module):
    """Scales by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.linear = 0, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Every sample is told from all others of its batch."""
    unit = F.normalize(output, dim=1)
    return F.cross_entropy(unit @ unit.roll(1, 1).t() * 5, torch.arange(len(unit)))


def counted(loss: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    return lambda output, target: (loss(output, target) * len(target), len(target))


@pytest.mark.parametrize(
    ("model", "name", "words"),
    [
        (
            lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
            "1",
            "nn.GroupNorm(2, 8)",
        ),
        (Centred, "body.inner.1", "'body.inner.1' (Centre) mixes samples"),
    ],
)
def test_a_layer_that_mixes_samples_is_named(model: Any, name: str, words: str) -> None:
    """The first whose output for a sample depends on the others."""
    batch_problem = problem(classification_job(model))

    assert batch_problem is not None and (batch_problem.kind, batch_problem.names) == (
        "samples",
        (name,),
    )
    assert (
        words in str(batch_problem)
        and "couples the samples" in str(batch_problem)
        and "tensor=N" in batch_problem.instead
    )


def test_a_layer_that_changes_with_every_forward_is_named() -> None:
    """What cutting a batch changes there is the number of forwards."""
    batch_problem = problem(classification_job(lambda: nn.Sequential(Counting(), nn.Identity())))

    assert batch_problem is not None and (batch_problem.kind, batch_problem.names) == (
        "changes",
        ("0",),
    )


@pytest.mark.parametrize("loss", [contrastive, counted(contrastive)])
def test_a_loss_that_compares_samples_is_named(loss: Any) -> None:
    """As a mean or as a (sum, count): it is no matter of its normalisation."""
    batch_problem = problem(classification_job(loss=loss))

    assert (
        batch_problem is not None
        and batch_problem.names == ("the loss",)
        and batch_problem.kind == "samples"
    )
    assert (
        "the loss compares them" in batch_problem.reason
        and "hold all samples that are compared" in batch_problem.instead
    )


def test_ignored_targets_are_no_comparison() -> None:
    """A mean over some targets is named as what it is, with (sum, count) as the way out."""
    batch_problem = problem(
        classification_job(
            ListedPerceptron,
            loss=lambda output, target: F.cross_entropy(output, target, ignore_index=2),
        )
    )

    assert (
        batch_problem is not None
        and batch_problem.kind == "loss"
        and "(sum, count)" in batch_problem.instead
    )


@pytest.mark.parametrize(
    "job",
    [
        classification_job(),
        tagging_job(),
        classification_job(
            ListedPerceptron,
            loss=lambda output, target: (output - F.one_hot(target, 3)).abs().mean(),
        ),
        classification_job(
            lambda: nn.Sequential(ListedPerceptron(), nn.Softmax(1)),
            loss=lambda output, target: F.binary_cross_entropy(
                output, F.one_hot(target, 3).to(output)
            ),
        ),
        classification_job(
            ListedPerceptron,
            loss=lambda output, target: F.cross_entropy(output, target, label_smoothing=0.1),
        ),
    ],
    ids=["mean", "sum-and-count", "kinks", "probabilities", "smoothing"],
)
def test_jobs_that_are_exact_have_no_problem(job: paceline.Job) -> None:
    """Of many losses."""
    assert problem(job) is None


@pytest.mark.slow
def test_a_plan_that_does_not_cut_the_batch_needs_no_conversion() -> None:
    """A layer that mixes samples, and a loss that does, are exact under split layers and placed parts."""
    certificates = paceline.verify(
        classification_job(Centred, loss=contrastive, drop_last=True, precision="float64"),
        ["tensor=2", "place=2", "data=2"],
        steps=1,
    )

    assert [certificate.passed for certificate in certificates] == [True, True, False]
    assert "couples the samples" in certificates[2].describe()
