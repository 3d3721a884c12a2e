"""A micro-batch in which the loss counts nothing trains with the rest of its window; complex gradients are clipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.perceptrons import ResidualNet
from jobs.stateful import assert_alike, stateful_job
from torch import Tensor, nn

from paceline.strategies.compose import load
from paceline.strategies.plan import Plan
from paceline.training.loop import train_rank
from paceline.training.settings import Settings


def sparse_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Any]:
    """About a quarter of the samples count; where none does, nothing depends on the model."""
    counts = target[:, 0] > 0.6
    if not bool(counts.any()):
        return torch.zeros(()), 0
    return (output - target)[counts].square().sum(), counts.sum()


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "plan",
    [
        "single microbatches=12",
        "data=3",
        "data=2 microbatches=6",
        "shard=3",
        "shard=2 zero=2 microbatches=3",
        "pipeline=2 microbatches=6",
        "place=2 microbatches=6",
        "servers=1 workers=3",
    ],
)
def test_a_micro_batch_that_counts_nothing(plan: str, tmp_path: Path):
    """Its rank takes part in every collective, and the window's count divides the gradients."""
    assert_alike(stateful_job(ResidualNet, loss=sparse_loss), plan, tmp_path)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x).to(self.weight.dtype) @ self.weight).abs())


@pytest.mark.parametrize(
    "plan", [pytest.param("single", marks=pytest.mark.slow), "data=2", "shard=2"]
)
def test_complex_gradients_are_clipped(run_ranks: Callable[..., Any], plan: str):
    """As torch clips the pairs of real numbers that they are."""
    job = stateful_job(Complex, clip=0.05, steps=1)
    clipped: list[Any] = []

    class Clipped:
        """What is in the gradients before clipping, and the weights after the update."""

        def initial(self, stepper: Any) -> None: ...

        def samples(self, step: int, batches: Any) -> None: ...

        def gradients(self, step: int, stepper: Any) -> None:
            self.before = {name: p.detach().clone() for name, p in whole(stepper).items()}
            self.gradient = {name: p.clone() for name, p in whole(stepper, gradient=True).items()}

        def weights(self, step: int, stepper: Any, loss: float) -> None:
            stand_ins = {
                name: torch.nn.Parameter(torch.zeros_like(g)) for name, g in self.gradient.items()
            }
            for name, p in stand_ins.items():
                p.grad = self.gradient[name]
            pairs = [torch.view_as_real(g) if g.is_complex() else g for g in self.gradient.values()]
            factor = 0.05 / (torch.nn.utils.get_total_norm(pairs) + 1e-6)
            assert factor < 1
            for name, p in whole(stepper).items():
                torch.testing.assert_close(
                    p.detach(), self.before[name] - 0.1 * factor * self.gradient[name]
                )
            clipped.append(float(factor))

    def body(context: Any) -> int:
        train_rank(
            context,
            job,
            Plan.parse(plan),
            Settings(None, (1,) * context.world_size, observer=Clipped()),
        )
        return len(clipped)

    load(Plan.parse(plan))
    assert set(run_ranks(body, Plan.parse(plan).world_size)) == {1}


def whole(stepper: Any, *, gradient: bool = False) -> dict[str, Tensor]:
    """The parameters of a rank, or their gradients, in full."""
    tensors = {name: p.grad if gradient else p for name, p in stepper.parameters.items()}
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in tensors.items()
    }
