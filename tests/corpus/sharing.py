"""Weights and modules that are used in several places."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline

from .registry import FEATURES, SAMPLES, Block, Net, adamw, entry, integers, make_job, numbers


class Tied(nn.Module):
    """A small language model whose last layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, FEATURES)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(FEATURES, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(vocabulary: int = 20, length: int = 5, *, ignored: float = 0.3) -> TensorDataset:
    """Tokens and the next ones, some of which are ignored."""
    x = integers(vocabulary, SAMPLES, length + 1)
    target = x[:, 1:].clone()
    target[torch.rand(target.shape, generator=torch.Generator().manual_seed(4)) < ignored] = -100
    return TensorDataset(x[:, :-1].contiguous(), target)


def token_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over counted tokens, and their number."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), (
        target >= 0
    ).sum()


@entry("an embedding tied to the last layer, tokens as a sum and a count")
def tied_embedding() -> paceline.Job:
    return make_job(Tied, data=tokens(), loss=token_loss, optimizer=adamw)


@entry("a tied embedding with clipping, whose norm counts it once")
def tied_with_clip() -> paceline.Job:
    return make_job(Tied, data=tokens(), loss=token_loss, clip=0.3)


@entry("a weight that three modules share")
def thrice_shared() -> paceline.Job:
    class Thrice(Net):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks[1:]:
                block.body.weight = self.blocks[0].body.weight

    return make_job(Thrice, optimizer=adamw)


@entry("a module that is called three times")
def recurrent_depth() -> paceline.Job:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = (
                nn.Linear(FEATURES, FEATURES),
                Block(),
                nn.Linear(FEATURES, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(3):
                x = self.block(x)
            return self.last(x)

    return make_job(Repeated)


@entry("one module under two names")
def module_under_two_names() -> paceline.Job:
    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2] = self.blocks[0]

    return make_job(Twice)


@entry("a reentrant checkpoint of a layer that is called three times")
def reentrant_shared() -> paceline.Job:
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.l, self.last = (
                nn.Linear(FEATURES, FEATURES),
                Block(),
                nn.Linear(FEATURES, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(3):
                x = checkpoint(self.l, x, use_reentrant=True)
            return self.last(x)

    return make_job(Reentrant)


@entry("an autoencoder whose decoder is its encoder transposed")
def transposed_decoder() -> paceline.Job:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList([nn.Linear(FEATURES, 6), nn.Linear(6, 4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.encoder:
                x = torch.tanh(layer(x))
            for layer in reversed(self.encoder):
                x = F.linear(x, layer.weight.T)
            return x

    return make_job(
        Transposed, data=TensorDataset(numbers(SAMPLES, FEATURES), numbers(SAMPLES, FEATURES))
    )


@entry("a net unrolled to a fixed point by a fixed number of turns")
def deep_equilibrium() -> paceline.Job:
    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inject, self.cell = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
            self.last = nn.Linear(FEATURES, 3)

        def forward(self, x: Tensor) -> Tensor:
            x, z = self.inject(x), torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(4):
                    z = torch.tanh(0.5 * self.cell(z) + x)
            return self.last(torch.tanh(0.5 * self.cell(z) + x))

    return make_job(Equilibrium)


@entry("a model that inner parts hold a reference to")
def parent_reference() -> paceline.Job:
    class Child(nn.Module):
        def __init__(self, scale: nn.Parameter) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(FEATURES, FEATURES), scale

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(FEATURES))
            self.children_ = nn.ModuleList([Child(self.scale) for _ in range(4)])
            self.last = nn.Linear(FEATURES, 3)

        def forward(self, x: Tensor) -> Tensor:
            for child in self.children_:
                x = torch.tanh(child(x))
            return self.last(x)

    return make_job(Parent)


@entry("an inner loop of gradient steps for each sample, whose weights run by functional_call")
def inner_loop() -> paceline.Job:
    class InnerLoop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(blocks=1)

        @torch.enable_grad()
        def forward(self, x: Tensor) -> Tensor:
            outputs = []
            for row in x:
                fast = dict(self.net.named_parameters())
                inner_loss = functional_call(self.net, fast, (row,)).square().mean()
                slopes = torch.autograd.grad(inner_loss, list(fast.values()), create_graph=True)
                fast = {
                    name: p - 0.5 * slope
                    for (name, p), slope in zip(fast.items(), slopes, strict=True)
                }
                outputs.append(functional_call(self.net, fast, (row,)))
            return torch.stack(outputs)

    return make_job(InnerLoop)
