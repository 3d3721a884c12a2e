"""Mixtures of experts, of which some may be idle."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

import paceline

from .registry import BATCH, FEATURES, SAMPLES, Block, adamw, entry, make_job, numbers


class Routed(nn.Module):
    """Each sample goes to its best expert; an expert without samples is not called."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, experts)
        self.experts = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        weight, which = self.router(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (which == number).nonzero()[:, 0]
            if len(rows):
                made = made.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return made


class RoutedNet(nn.Module):
    """Blocks of experts."""

    def __init__(self, layer: Callable[[], nn.Module] = Routed) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.blocks, self.last = (
            nn.ModuleList([Block(layer()), Block(layer())]),
            nn.Linear(FEATURES, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@entry("top-1 routing, where an expert without samples is not called")
def routed_experts() -> paceline.Job:
    return make_job(RoutedNet, optimizer=adamw)


class Idle(nn.Module):
    """The last expert is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 2)
        self.experts = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(weights[:, i : i + 1] * self.experts[i](x) for i in range(2))


@entry("an expert that is never called and must not decay")
def idle_expert() -> paceline.Job:
    return make_job(lambda: RoutedNet(Idle), optimizer=adamw)


class Masked(nn.Module):
    """Every expert sees every sample, and a mask picks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        kept = weights * F.one_hot(weights.argmax(-1), 4)
        return sum(kept[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@entry("top-1 routing by masks: all experts see all samples")
def masked_experts() -> paceline.Job:
    return make_job(lambda: RoutedNet(Masked), optimizer=adamw)


class Batched(nn.Module):
    """All experts' weights in one tensor, the two best weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 4)
        self.weight = nn.Parameter(torch.randn(4, FEATURES, FEATURES) / 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, which = self.router(x).softmax(-1).topk(2)
        return (torch.einsum("bd,bkde->bke", x, self.weight[which]) * weights[..., None]).sum(1)


@entry("top-2 routing with all experts in one tensor")
def batched_experts() -> paceline.Job:
    return make_job(lambda: RoutedNet(Batched))


@entry("experts with a loss that balances them over the batch: coupled")
def balanced_experts() -> paceline.Job:
    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.weight = (
                nn.Linear(FEATURES, 4),
                nn.Parameter(torch.randn(4, FEATURES, 3) / 3),
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weights = self.router(x).softmax(-1)
            return torch.einsum("bd,kde,bk->be", x, self.weight, weights), weights

    return make_job(
        Balanced,
        loss=lambda output, target: (
            F.mse_loss(output[0], target) + 4 * output[1].mean(0).square().sum()
        ),
    )


@entry("a gate that closes: a block whose weight stays zero for a while")
def closed_gate() -> paceline.Job:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gate = nn.Linear(FEATURES, FEATURES), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.gate

    return make_job(lambda: RoutedNet(Gated))


@entry("adapters named by the batch, idle in other steps, and a layer that nothing uses")
def adapters_in_turn() -> paceline.Job:
    class Adapters(RoutedNet):
        def __init__(self) -> None:
            super().__init__(lambda: nn.Linear(FEATURES, FEATURES))
            self.layers = nn.ModuleDict({name: nn.Linear(FEATURES, FEATURES) for name in "ab"})
            self.scales = nn.ParameterDict({name: torch.ones(FEATURES) for name in "ab"})
            self.spare = nn.Linear(2, 2)

        def forward(self, x: Tensor, name: list[str]) -> Tensor:
            return super().forward(x + torch.tanh(self.layers[name[0]](x)) * self.scales[name[0]])

    data = [
        ({"x": x, "name": "ab"[number // BATCH % 2]}, x[:3])
        for number, x in enumerate(numbers(SAMPLES, FEATURES))
    ]
    return make_job(Adapters, data=data, sampler=SequentialSampler(data), optimizer=adamw)
