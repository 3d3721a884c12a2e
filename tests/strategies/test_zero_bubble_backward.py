"""A backward in two parts, the gradients of inputs before those of weights: only where no weight is used twice."""

from __future__ import annotations

import pytest
import torch
from jobs.stateful import in_turn, stateful_job
from torch import Tensor, nn

from paceline.strategies.stages.engine import uses_weights_once


class Recurrent(nn.Module):
    """A cell that reads a part of the samples at each of its steps, of which each stage does several."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTMCell(2, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 6)
        x = x.reshape(len(x), 4, 2)
        for time in range(4):
            h, c = self.cell(x[:, time], (h, c))
        return self.last(h)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["pipeline=2 microbatches=3 schedule=zero-bubble"])
@in_turn(lambda plan: stateful_job(Recurrent))
def test_weights_that_a_stage_uses_twice():
    """torch comes to nodes that it has freed if it does the weights' part apart, as it reaches some of these weights by
    paths that don't lead to the stage's inputs."""


class Gated(nn.Module):
    """A layer in the middle that also makes a gate of the samples, for the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.gate, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.middle(torch.tanh(self.first(x))))
        gate = torch.sigmoid(self.gate(x))
        return self.out(torch.tanh(self.last(y)) * gate)


@pytest.mark.parametrize(
    "plan", [f"pipeline={ranks} microbatches=3 schedule=zero-bubble" for ranks in (2, 3)]
)
@pytest.mark.sweep(1)
@in_turn(lambda plan: stateful_job(Gated))
def test_weights_beside_the_path_of_a_stage():
    """No gradient goes from the gate's weights on to the inputs of their stage."""


@pytest.mark.parametrize(
    ("forward", "once"),
    [
        (lambda a, b, x: b(torch.tanh(a(x))), True),
        (lambda a, b, x: a(torch.tanh(a(x))), False),
        (lambda a, b, x: a(x) * a(x.sin()), False),
        (lambda a, b, x: a(x) + torch.tanh(b(x)) + x, True),
        (lambda a, b, x: b(a(x)) + a.weight.sum(), False),
    ],
)
def test_whether_weights_are_used_once(forward: object, once: bool):
    a, b, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    assert uses_weights_once([forward(a, b, x)], [x]) is once  # type: ignore[operator]
