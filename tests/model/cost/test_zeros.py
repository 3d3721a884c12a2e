"""Which operands of an update are zero for certain: what is kept of a table's rows that no sample names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from paceline.job import Job
from paceline.model.cost import profile_job
from paceline.model.cost.arena import Arena, prepared
from paceline.model.cost.op_calls import Operand, OperatorCall
from paceline.planner.multi_model import priced

ROWS, LENGTH, WIDTH = 400, 4, 8


class Endless(IterableDataset):  # type: ignore[type-arg]
    """Without a length."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.zeros(LENGTH, dtype=torch.long), torch.zeros(LENGTH, WIDTH)


def zero_parts(
    data: object, optimizer: Callable[[Any], Any] = torch.optim.AdamW
) -> dict[str, float]:
    """The greatest of each operator's operands of the table's shape."""
    profile = profile_job(
        Job(
            model=lambda: nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)),
            data=data,
            loss=F.mse_loss,
            batch=2,
            steps=1,
            optimizer=lambda named: optimizer(named),
        )
    )
    parts: dict[str, float] = {}
    for call in profile.update.calls.first:
        for operand in call.operands():
            if operand.shape == (ROWS, WIDTH):
                parts[call.name] = max(parts.get(call.name, 0.0), operand.zero_part)
    return parts


@pytest.mark.parametrize(("samples", "part"), [(25, 0.75), (40, 0.5), (1000, 0.0)])
def test_rows_that_no_sample_names_have_no_second_moment(samples: int, part: float):
    """So many tokens name as many rows at most; in eighths. The weights are not zero."""
    tokens = torch.zeros(samples, LENGTH, dtype=torch.long)
    parts = zero_parts(TensorDataset(tokens, torch.zeros(samples, LENGTH, WIDTH)))

    assert parts["sqrt"] == parts["addcmul_"] == parts["lerp_"] == part
    assert parts["div"] == 0.0


def test_data_without_a_length_may_name_every_row():
    assert set(zero_parts(Endless()).values()) == {0.0}


def test_a_step_of_its_own_may_name_every_row():
    """What it runs models on is not known but for the samples that are seen, and neither is how many there are."""

    def step(ctx: Any, batch: Any) -> None:
        tokens, goals = batch
        ctx.backward(
            "table", tokens, lambda rows, batch, goals: (rows - goals).pow(2).mean(), goals
        )
        ctx.update("table")

    job = Job(
        models={"table": lambda: nn.Embedding(ROWS, WIDTH)},
        optimizers={"table": torch.optim.AdamW},
        step=step,
        data=Endless(),
        batch=2,
        steps=1,
    )
    profile = profile_job(priced(job))

    operands = [operand for call in profile.update.calls.first for operand in call.operands()]
    assert any(operand.shape == (ROWS, WIDTH) for operand in operands)
    assert all(operand.zero_part == 0.0 for operand in operands)


def test_operators_are_timed_with_zeros():
    """Of a whole operand; others stay without."""
    arena = Arena()
    whole, half = (
        arena.operand(Operand((64, 8), (8, 1), "float32", zero_part=part), 0) for part in (0.0, 0.5)
    )

    assert bool((whole > 0).all()) and int((half == 0).sum()) == 64 * 8 / 2
    call = OperatorCall("aten.sqrt.default", (Operand((64, 8), (8, 1), "float32", zero_part=0.5),))
    assert call.key != OperatorCall("aten.sqrt.default", (Operand((64, 8), (8, 1), "float32"),)).key
    prepared(call, arena)[0]()


@pytest.mark.parametrize(
    ("optimizer", "part"),
    [
        (lambda named: torch.optim.Adam(named), 0.75),
        (lambda named: torch.optim.Adam(named, weight_decay=0.1), 0.0),
        (lambda named: torch.optim.Adagrad(named, initial_accumulator_value=0.1), 0.0),
    ],
)
def test_moments_are_not_zero_where_something_else_is_added(
    optimizer: Callable[[Any], Any], part: float
):
    """Decay that is added to gradients, or a first value of the state. AdamW's decay is not."""
    data = TensorDataset(torch.zeros(25, LENGTH, dtype=torch.long), torch.zeros(25, LENGTH, WIDTH))

    assert zero_parts(data, optimizer)["sqrt"] == part


def test_copies_of_an_operand_that_is_near_are_at_one_place():
    """It stays in the caches beside one that is far."""
    arena, near = Arena(), Operand((64, 8), (8, 1), "float32", 0.0, zero_part=0.5)

    assert (
        arena.operand(near, 0).data_ptr()
        == arena.operand(near, 0).data_ptr()
        != arena.operand(near, 64).data_ptr()
    )
