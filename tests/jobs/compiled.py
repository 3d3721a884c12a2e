"""Small jobs whose blocks can be compiled, and some whose blocks can't."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import paceline
from jobs.classification import classification_job
from paceline.model.randomness import means


class Block(nn.Module):
    """A feed-forward block of a transformer with dropout, and a buffer that each forward of training changes."""

    def __init__(
        self, width: int = 6, hidden: int = 12, drop: float = 0.2, counts: bool = True
    ) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )
        self.drop = nn.Dropout(drop)
        self.calls: Tensor | None
        self.register_buffer("calls", torch.zeros(1) if counts else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.calls is not None:
            self.calls.add_(1.0)
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Two blocks that are alike, one with another width inside, and a root."""

    def __init__(self, drop: float = 0.2, last_hidden: int = 9, counts: bool = True) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            Block(hidden=hidden, drop=drop, counts=counts) for hidden in (12, 12, last_hidden)
        )
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Recurrent(nn.Module):
    """A recurrent layer over one token of each sample."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unsqueeze(0))[0].squeeze(0)


class Breaking(nn.Module):
    """Whose block prints, which torch.compile can't trace."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OfOne(forward)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class OfOne(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.linear, self.count, self.does = nn.Linear(6, 3), 0, forward

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


def prints(module: OfOne, x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return module.linear(x)


def counts(module: OfOne, x: Tensor) -> Tensor:
    """Every forward is a compilation of its own: the number is part of the code."""
    module.count += 1
    return module.linear(x) * (1.0 + 0.001 * float(module.count))


def fails(module: OfOne, x: Tensor) -> Tensor:
    return module.linear(x[:, :5])


def compiled_job(model: Any = Net, **changes: Any) -> paceline.Job:
    return classification_job(model, **{"steps": 3, **changes})


def traced(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """A backend that runs what torch traced, forward and backward, operator by operator: seconds without a compiler."""
    return aot_autograd(fw_compiler=_boxed)(graph, inputs)


def traced_with_means(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    return aot_autograd(fw_compiler=_boxed, decompositions=means())(graph, inputs)


def _boxed(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    def run(arguments: list[Any]) -> Any:
        return fx.Interpreter(graph).boxed_run(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
