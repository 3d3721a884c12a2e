"""Plain layers one after the other: what a test trains that is about no model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Perceptron(nn.Module):
    """Two hidden layers in an `nn.Sequential`, and a root that owns the last layer: (batch, 6) to (batch, 3)."""

    def __init__(self, first: int = 12, second: int = 9) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, first), nn.Tanh(), nn.Linear(first, second), nn.Tanh()
        )
        self.out = nn.Linear(second, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x))


class ListedPerceptron(nn.Module):
    """Layers in an `nn.ModuleList`, and a root that owns the last layer.

    Args:
        widths: Of the input, of each listed layer's output, and of the output.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__()
        *hidden, outputs = widths or (6, 9, 7, 3)
        self.layers = nn.ModuleList(map(nn.Linear, hidden, hidden[1:]))
        self.out = nn.Linear(hidden[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


class ResidualBlock(nn.Module):
    """A layer whose input is added to its output."""

    def __init__(self, width: int = 8, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class ResidualNet(nn.Module):
    """A layer, blocks in a list, a layer: (batch, 8) to (batch, 4)."""

    def __init__(self, block: Callable[[], nn.Module] = ResidualBlock, count: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)
