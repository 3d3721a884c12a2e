"""A loss with weights of its own is named: nobody would train them."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.base.errors import JobError
from paceline.training.optimizers.build import _built


class Weighted(nn.Module):
    """Weighs tasks by numbers that it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2 * (-self.log_variances).exp() + self.log_variances).mean()


CRITERION, NET = Weighted(), nn.Linear(3, 2)


def build(loss: Any, optimizer: Any = None) -> None:
    job = paceline.Job(
        model=lambda: NET,
        data=[(torch.zeros(3), torch.zeros(2))],
        loss=loss,
        batch=1,
        steps=1,
        optimizer=optimizer or (lambda named: torch.optim.SGD(named, lr=0.1)),
    )
    _built(job, dict(NET.named_parameters()), dict(NET.named_parameters()))


@pytest.mark.parametrize(
    "loss",
    [
        CRITERION,
        CRITERION.forward,
        partial(CRITERION),
        partial(lambda c, o, t: c(o, t), Weighted()),
        lambda output, target: CRITERION(output, target),
        (lambda inside: lambda output, target: inside(output, target))(Weighted()),
    ],
)
def test_weights_that_nobody_trains_are_named(loss: Any) -> None:
    with pytest.warns(
        UserWarning, match="the loss has trainable weights of its own, such as 'log_variances'"
    ):
        build(loss)


def test_a_loss_may_hold_frozen_weights_and_look_at_the_model() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(Weighted().requires_grad_(False))
        build(
            lambda output, target: (
                nn.functional.mse_loss(output, target) + NET.weight.square().sum()
            )
        )


def test_an_optimizer_that_holds_them_is_refused_with_the_form_that_trains_them() -> None:
    with pytest.raises(JobError, match="1 parameters that are not the model's") as refused:
        build(
            CRITERION,
            lambda named: torch.optim.SGD(
                [*(p for _, p in named), *CRITERION.parameters()], lr=0.1
            ),
        )
    assert "second model" in refused.value.hint
