"""A job checks its fields when it is made, and knows its length in optimizer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline.base.errors import JobError, PacelineError
from paceline.job import Job
from paceline.reports.comparison import _LESS_IS_BETTER
from paceline.searches.objectives import PREDICTED


class Stream:
    """A dataset of unknown length."""

    def __iter__(self) -> Any:
        return iter([(0, 0)])


def make(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": list,
        "data": [(0, 0)] * 10,
        "loss": max,
        "optimizer": list,
        "batch": 4,
    }
    if not {"epochs", "steps"} & set(changes):
        fields["epochs"] = 3
    return Job(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "per_epoch", "total"),
    [
        ({}, 3, 9),
        ({"drop_last": True}, 2, 6),
        ({"batch": 5}, 2, 6),
        ({"batch": 100}, 1, 3),
        ({"steps": 7}, 3, 7),
        ({"data": Stream(), "steps": 7}, None, 7),
        ({"data": Stream(), "epochs": 2}, None, None),
    ],
)
def test_the_length_is_known_in_steps(
    changes: dict[str, Any], per_epoch: int | None, total: int | None
):
    """The short last batch counts unless it is dropped; a stream's length is not known."""
    job = make(**changes)
    assert job.steps_per_epoch == per_epoch
    assert job.total_steps == total


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ({"batch": 2.0}, "batch must be a whole"),
        ({"batch": True}, "batch must be a whole number"),
        ({"epochs": 0}, "epochs must be a whole number"),
        ({"steps": -1}, "steps must be a whole number"),
        ({"steps": 1, "epochs": 1}, "either epochs or steps, got both"),
        ({"epochs": None}, "either epochs or steps, got neither"),
        ({"precision": "bf61"}, "'bf61' is none of float32, tf32, bf16"),
        ({"clip": 0}, "clip must be a positive number, got 0"),
        ({"clip": float("nan")}, "clip must be"),
        ({"clip": float("inf")}, "clip must be"),
        ({"clip": True}, "clip must be"),
        ({"clip": "1"}, "clip must be"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"seed": True}, "seed must be a whole number"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"validation": []}, "validation has no samples: leave it out"),
        ({"model": 3}, "model must be callable, got int"),
        ({"loss": 3}, "loss must be callable"),
        ({"optimizer": "adam"}, "optimizer must be callable, got str"),
        ({"lr_schedule": 0.1}, "lr_schedule must be"),
        ({"data": 3}, "data must be a torch dataset, got int"),
        ({"data": None}, "data must be a torch dataset"),
        ({"data": []}, "data has no samples"),
        ({"validation": 3}, "validation must be a torch dataset, got int"),
        (
            {"drop_last": True, "batch": 11},
            "drop_last leaves nothing: data has 10 samples and batch is 11",
        ),
        ({"metrics": {"accuracy": 3}}, "metrics must map names to functions"),
        ({"metrics": [max]}, "metrics must map"),
        ({"metrics": {"accuracy": max}}, "there is none: give validation="),
        ({"metrics": {1: max}}, "metrics must map"),
        *(
            (
                {"metrics": {name: max}, "validation": [(1.0, 1.0)]},
                f"a metric can't be called '{name}'",
            )
            for name in (
                "loss",
                "validation_loss",
                "step",
                "epoch",
                "lr",
                "gradient_norm",
                "check",
                *_LESS_IS_BETTER,
                *PREDICTED,
            )
        ),
    ],
)
def test_a_field_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str):
    """The message names the field, what was given and what it may be."""
    with pytest.raises(JobError) as caught:
        make(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"callbacks": True},
        {
            "validation_step": lambda ctx, batch: {
                "loss": torch.zeros(()),
                "validation_loss": torch.ones(()),
            }
        },
    ],
)
def test_figures_that_are_named_as_the_runs_own_are_refused(
    changes: dict[str, Any], tmp_path: Path
):
    """`run.log({"step": ...})` would move the line to another step, a figure of `validation_step` take the place of the
    loss."""

    class Logs(pl.Callback):
        def on_step(self, run: Any, step: Any) -> None:
            run.log({"step": 7})

    rows = [(torch.ones(1), torch.ones(1))] * 2
    model: dict[str, Any] = (
        {
            "model": lambda: torch.nn.Linear(1, 1),
            "callbacks": [Logs()],
            "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        }
        if "callbacks" in changes
        else {
            "models": {"a": lambda: torch.nn.Linear(1, 1)},
            **changes,
            "optimizers": {"a": lambda named: torch.optim.SGD(named, lr=0.1)},
        }
    )
    job = pl.Job(data=rows, validation=rows, loss=F.mse_loss, batch=2, steps=1, **model)
    with pytest.raises(
        PacelineError,
        match=r"'step' is the step|validation_step returned validation_loss: every run has",
    ):
        pl.train(job, "single", run=tmp_path / "run")


def test_everything_wrong_with_a_job_is_said_at_once():
    """Two wrong fields make one message."""
    with pytest.raises(JobError, match=r"batch must be .*\nseed must be"):
        make(batch=0, seed="x")


def test_a_module_is_not_a_function_that_builds_one():
    """A built module is refused, its class is not: every rank builds its own."""
    import torch

    with pytest.raises(JobError, match=r"model must be a function that builds the module"):
        make(model=torch.nn.Linear(1, 1))
    assert make(model=torch.nn.Identity).model is torch.nn.Identity


def test_a_loader_of_another_kind_is_not_a_dataset():
    """Batches are cut from the global batch; what makes its own is refused unless it is torch's DataLoader."""

    class Loader(list):  # type: ignore[type-arg]
        batch_sampler = None

    loader: Any = Loader([(0, 0)] * 4)
    for name in ("data", "validation"):
        with pytest.raises(JobError, match=f"{name} must be the dataset itself, not a Loader"):
            make(**{name: loader})


def test_an_iterable_dataset_of_torch_has_no_length():
    """torch's IterableDataset without a length is a stream."""
    from torch.utils.data import IterableDataset

    class Numbers(IterableDataset):
        def __iter__(self) -> Any:
            return iter([(0, 0)])

    assert make(data=Numbers(), steps=2).num_samples is None
