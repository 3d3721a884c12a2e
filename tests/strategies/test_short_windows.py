"""A window of fewer samples than micro-batches: those without samples leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs.stateful import stateful_job, trained
from torch import Tensor, nn


class Counting(nn.Module):
    """Counts its forwards and backwards in a buffer, in a frozen parameter and in a hook on a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.register_buffer("forwards", torch.zeros(()))
        self.register_buffer("backwards", torch.zeros(()))
        self.edits = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.layers[2].bias.register_post_accumulate_grad_hook(self.count)

    def count(self, parameter: Tensor) -> None:
        self.backwards.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        self.forwards.add_(1)
        with torch.no_grad():
            self.edits.add_(1)
        return y + 0.0 * self.edits


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "forwards", "backwards"),
    [
        ("single microbatches=4", 9, 9),
        ("data=2 microbatches=2", 5, 5),
        ("shard=2 microbatches=2", 5, 5),
        pytest.param("data=3", 3, 3, marks=pytest.mark.slow),
        pytest.param("tensor=2 microbatches=4", 9, 9, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_without_samples_change_nothing(
    plan: str, forwards: int, backwards: int, tmp_path: Path
):
    """Windows of 12, 12 and one sample: four, four and one micro-batch, or for each of two replicas two, two, and one
    or none. A buffer of whole numbers in floating point becomes the mean over the samples."""
    state = trained(stateful_job(Counting, samples=25, steps=3), plan, tmp_path)
    assert state["forwards"].item() == forwards
    assert state["backwards"].item() == backwards
    assert state["edits"].tolist() == [forwards] * 4


@pytest.mark.slow
@pytest.mark.checked_runs
def test_a_forward_may_change_a_weight_at_once(tmp_path: Path):
    """The first update is compared from the weights that the first forward finds."""
    trained(stateful_job(Counting), "data=2", tmp_path)


class Targeted(nn.Module):
    """Counts forwards in a frozen parameter of a stage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.counting, self.last = nn.Linear(8, 8), Edited(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.counting(torch.tanh(self.first(x))))


class Edited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.edits = nn.Linear(8, 8), nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.edits.add_(1)
        return self.linear(x) + 0.0 * self.edits


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 microbatches=4",
        "pipeline=2 microbatches=4 schedule=zero-bubble",
        "place=2 microbatches=4",
    ],
)
def test_stages_leave_them_out(plan: str, tmp_path: Path):
    """Every rank's order of actions goes on without them."""
    state = trained(stateful_job(Targeted, samples=25, steps=3), plan, tmp_path)
    assert state["counting.edits"].tolist() == [9] * 8
