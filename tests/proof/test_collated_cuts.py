"""Batches that can't be cut along dim 0 are cut as plans cut them: the job's own collate makes a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.proof.order import CollatedBatch, whole_batches
from paceline.proof.problems import job_problem
from paceline.proof.reference_loop import cut_batch, part_of_batch, permuted, unspoilt


def boxes() -> list[tuple[Tensor, dict[str, Tensor]]]:
    draws = torch.Generator().manual_seed(0)
    return [
        (torch.randn(6, generator=draws), {"boxes": torch.rand(1 + k % 3, 2, generator=draws)})
        for k in range(12)
    ]


def listed(samples: list[Any]) -> tuple[Tensor, list[Any]]:
    """As detectors want them: a target is a list of mappings."""
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), list(targets)


def concatenated(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """As graph networks want them: nodes of all samples, one after another."""
    rows = [x.expand(len(target["boxes"]), 6) for x, target in samples]
    return torch.cat(rows), torch.cat([target["boxes"] for _, target in samples])


def of_boxes(output: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack(
        [
            F.l1_loss(row.expand_as(target["boxes"]), target["boxes"])
            for row, target in zip(output, targets, strict=True)
        ]
    ).mean()


def job(collate: Any, loss: Any) -> paceline.Job:
    return paceline.Job(
        model=lambda: nn.Linear(6, 2),
        data=boxes(),
        collate=collate,
        loss=loss,
        batch=6,
        steps=2,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        precision="float64",
    )


def test_a_part_is_collated():
    """A cut and another order, also after its tensors were replaced; streams stay as they are."""
    batch = next(whole_batches(job(listed, of_boxes), 1))
    assert isinstance(batch, CollatedBatch) and batch.input.dtype is torch.float64
    state = torch.get_rng_state()
    first, second = cut_batch(unspoilt(batch), 2)

    assert torch.equal(torch.get_rng_state(), state)
    assert [len(part.target) for part in (batch, first, second)] == [6, 3, 3]
    assert torch.equal(second.input, batch.input[3:])
    assert torch.equal(second.target[0]["boxes"], batch.target[3]["boxes"])
    assert [len(piece.target) for piece in cut_batch(first, 3)] == [1, 1, 1]
    shuffled = permuted(batch, torch.Generator().manual_seed(1))
    assert sorted(shuffled.input[:, 0].tolist()) == sorted(batch.input[:, 0].tolist())
    assert len(part_of_batch(shuffled, range(1, 3)).target) == 2


def test_lists_of_targets_are_no_problem():
    assert job_problem(job(listed, of_boxes), steps=2) is None


@pytest.mark.parametrize("collate", [listed, concatenated])
def test_a_mean_over_something_else_is_one(collate: Any):
    """Over boxes, whose number differs from sample to sample."""

    def per_box(output: Tensor, targets: Any) -> Tensor:
        if isinstance(targets, list):
            output = torch.cat(
                [
                    row.expand_as(target["boxes"])
                    for row, target in zip(output, targets, strict=True)
                ]
            )
            targets = torch.cat([target["boxes"] for target in targets])
        return F.mse_loss(output, targets)

    problem = job_problem(job(collate, per_box), steps=2)

    assert problem is not None and "(sum, count)" in str(problem)
