"""A step tried before a run: what it calls each model with, also where that is no sample of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.base.errors import JobError, TrainingError
from paceline.planner.multi_model import priced
from paceline.training.feed import example_batch
from paceline.training.own_step.named_parts import TRIED_SAMPLES, job_of
from paceline.training.own_step.recorded import recorded


class Board(nn.Module):
    """Two rows that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, 4))

    def forward(self, more: Tensor | None = None, name: str = "") -> Tensor:
        assert more is None or more.shape == (3, 4)
        return self.rows.clone()


def job(step: Any = None) -> pl.Job:
    def usual(ctx: pl.StepContext, batch: Any) -> None:
        ctx.run("net", ctx.run("board", (None, "first"), cut=False), cut=False)
        ctx.run("board", (torch.zeros(3, 4), "then"), cut=False)
        noise = torch.randn(len(batch), 4)
        ctx.backward("net", noise, lambda out, batch: (out + torch.zeros(1)).mean())
        ctx.update("net")

    return pl.Job(
        models={"net": lambda: nn.Linear(4, 2), "board": Board},
        optimizers={"net": torch.optim.SGD},
        training_step=step or usual,
        data=[torch.ones(4)] * 9,
        batch=3,
        steps=1,
        precision="float64",
    )


def test_inputs_that_are_no_samples_are_kept_whole() -> None:
    """A model that is first run on rows of a board counts by the samples that it is run on later."""
    seen = recorded(job(), 5)

    assert seen.uncut == {"board"} and seen.inputs["board"] == (None, "first")
    assert seen.inputs["net"].shape == (5, 4) and seen.inputs["net"].dtype is torch.float64
    for samples in (1, 2, TRIED_SAMPLES + 1):
        assert example_batch(job_of(job(), "net", lambda: seen), samples).input.shape == (
            samples,
            4,
        )
        assert example_batch(job_of(job(), "board", lambda: seen), samples).input == (None, "first")


def test_such_a_job_is_priced() -> None:
    """By a model that runs each on inputs of its own, however many samples are stacked."""
    alone = priced(job())
    stacked = torch.utils.data.default_collate([alone.data[0]] * 6)

    assert [tuple(each.shape) for each in alone.model().double()(**stacked)] == [(6, 2), (2, 4)]


def test_a_step_that_fails_where_it_is_tried_is_named_as_that() -> None:
    def fails(ctx: pl.StepContext, batch: Any) -> None:
        ctx.run("net", torch.zeros(len(batch), 7))

    with pytest.raises(
        TrainingError, match=r"the job's step was tried on 3 samples, .* RuntimeError: mat1"
    ):
        recorded(job(fails), 4)

    def has_the_size_of_a_batch(ctx: pl.StepContext, batch: Any) -> None:
        ctx.run("board", (), cut=False)
        ctx.run("net", torch.zeros(3, 4) + batch.input)

    assert recorded(job(has_the_size_of_a_batch), 5).inputs["net"].shape == (3, 4)

    def gives_an_object(ctx: pl.StepContext, batch: Any) -> None:
        ctx.run("board", (None, object()), cut=False)
        ctx.backward("net", batch, lambda out, batch: out.mean())

    with pytest.raises(JobError, match="runs a model with a object"):
        priced(job(gives_an_object))
