"""How models are put together: branches, conditioning, nets that make weights, graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

from .registry import FEATURES, SAMPLES, Block, Net, adamw, entry, integers, make_job, numbers


@entry("features scaled and shifted by a condition, as FiLM")
def film() -> paceline.Job:
    class Film(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(3)])
            self.films = nn.ModuleList([nn.Linear(4, 2 * FEATURES) for _ in range(3)])
            self.last = nn.Linear(FEATURES, 3)

        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            for block, film in zip(self.blocks, self.films, strict=True):
                scale, shift = film(condition).chunk(2, -1)
                x = torch.tanh(block(x) * (1 + scale) + shift)
            return self.last(x)

    x, c, y = numbers(SAMPLES, FEATURES), numbers(SAMPLES, 4, seed=5), numbers(SAMPLES, 3, seed=3)
    return make_job(
        Film, data=[({"x": a, "condition": b}, t) for a, b, t in zip(x, c, y, strict=True)]
    )


@entry("a net that makes another layer's weights for each sample")
def hypernetwork() -> paceline.Job:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.maker = Net(outputs=4), nn.Linear(FEATURES, 12)

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(self.maker(x).view(-1, 3, 4), self.net(x)[..., None])[..., 0]

    return make_job(Hyper)


@entry("two branches that meet at the end")
def two_branches() -> paceline.Job:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.last = Net(outputs=4), Net(outputs=4), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cat([self.left(x), self.right(x.flip(1))], 1))

    return make_job(Branches)


@entry("several heads that weigh differently")
def several_heads() -> paceline.Job:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(outputs=FEATURES)
            self.heads = nn.ModuleList([nn.Linear(FEATURES, 3) for _ in range(3)])

        def forward(self, x: Tensor) -> list[Tensor]:
            x = self.net(x)
            return [head(x) for head in self.heads]

    return make_job(
        Heads,
        loss=lambda output, target: sum(
            F.mse_loss(each, target) * scale
            for each, scale in zip(output, (1.0, 0.5, 0.1), strict=True)
        ),
    )


@entry("messages on a graph that is the same for all samples")
def graph_net() -> paceline.Job:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", integers(FEATURES, 2, 16))
            self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
            self.into, self.last = nn.Linear(1, 2), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            nodes = self.into(x[..., None])
            for layer in self.layers:
                messages = layer(nodes[:, self.edges[0]])
                nodes = nodes + torch.zeros_like(nodes).index_add(1, self.edges[1], messages).tanh()
            return self.last(nodes.mean(1))

    return make_job(Graph)


@entry("a set of points, pooled by their greatest feature")
def point_set() -> paceline.Job:
    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.Sequential(
                nn.Linear(3, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES)
            )
            self.net = Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.each(x).amax(1))

    return make_job(
        Points,
        data=TensorDataset(numbers(SAMPLES, 7, 3), numbers(SAMPLES, 3, seed=3)),
        optimizer=adamw,
    )


@entry("factors of users and items, with biases and wide features")
def factorisation() -> paceline.Job:
    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(12, 4), nn.Embedding(15, 4)
            self.bias, self.mlp = (
                nn.Embedding(15, 1),
                nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)),
            )

        def forward(self, x: Tensor) -> Tensor:
            user, item = self.users(x[:, 0]), self.items(x[:, 1])
            deep = self.mlp(torch.cat([user, item], 1))
            return ((user * item).sum(1, keepdim=True) + self.bias(x[:, 1]) + deep)[:, 0]

    return make_job(
        Factors,
        data=TensorDataset(integers(12, SAMPLES, 2), numbers(SAMPLES, seed=3)),
        optimizer=adamw,
    )


@entry("a mixer of tokens and channels")
def mixer() -> paceline.Job:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.channels = nn.Linear(5, 5), nn.Linear(FEATURES, FEATURES)
            self.one, self.two = nn.LayerNorm(FEATURES), nn.LayerNorm(FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.tokens(self.one(x).transpose(1, 2)).transpose(1, 2).tanh()
            return x + self.channels(self.two(x)).tanh()

    model = lambda: nn.Sequential(  # noqa: E731
        Mixer(), Mixer(), Mixer(), nn.Flatten(), nn.Linear(5 * FEATURES, 3)
    )
    return make_job(
        model, data=TensorDataset(numbers(SAMPLES, 5, FEATURES), numbers(SAMPLES, 3, seed=3))
    )


@entry("a diffusion model: noise and its time are part of the data")
def diffusion() -> paceline.Job:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.time = Net(outputs=FEATURES), nn.Embedding(10, FEATURES)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return self.net(x + self.time(time))

    x, noise, time = (
        numbers(SAMPLES, FEATURES),
        numbers(SAMPLES, FEATURES, seed=5),
        integers(10, SAMPLES),
    )
    level = (time / 10)[:, None]
    made = x * (1 - level).sqrt() + noise * level.sqrt()
    return make_job(Denoiser, data=[((a, t), n) for a, t, n in zip(made, time, noise, strict=True)])


@entry("residual blocks in a Sequential")
def blocks_in_sequence() -> paceline.Job:
    return make_job(
        lambda: nn.Sequential(*(Block() for _ in range(5)), nn.Linear(FEATURES, 3)), optimizer=adamw
    )


@entry("branches by a flag of the model that never changes")
def constant_branch() -> paceline.Job:
    class Flagged(Net):
        def __init__(self) -> None:
            super().__init__()
            self.deep = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks if self.deep else ():
                x = block(x)
            return self.last(x)

    return make_job(Flagged)


@entry("a branch that depends on the data: a batch-wide flag, alike in all batches")
def data_branch() -> paceline.Job:
    class Branching(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.abs() if bool((x > 100).any()) else x)

    return make_job(Branching)


@entry("a penalty on activations that the model adds to its own output")
def activation_penalty() -> paceline.Job:
    class Penalised(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.first(x)
            for block in self.blocks:
                hidden = block(hidden)
            return self.last(hidden), hidden.square().mean(1)

    return make_job(
        Penalised,
        loss=lambda output, target: F.mse_loss(output[0], target) + 0.01 * output[1].mean(),
    )


@entry("blocks that write to what they are given, and a skip that reads it afterwards")
def blocks_write_to_their_input() -> paceline.Job:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(1.1)
            return torch.relu_(self.linear(self.norm(x)))

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)
            self.blocks = nn.ModuleList([Writing() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return self.last(x)

    return make_job(Skips)


@entry("blocks that put their outputs into one list and take them out again, as a U-Net's")
def skips_in_a_list() -> paceline.Job:
    class Down(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, FEATURES)

        def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
            skips.append(torch.tanh(self.linear(x)))
            return skips[-1] * 0.5

    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2 * FEATURES, FEATURES)

        def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
            return torch.tanh(self.linear(torch.cat([x, skips.pop()], 1)))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.ModuleList([Down(), Down()]), nn.ModuleList([Up(), Up()])
            self.last = nn.Linear(FEATURES, 3)

        def forward(self, x: Tensor) -> Tensor:
            skips: list[Tensor] = []
            for block in (*self.down, *self.up):
                x = block(x, skips)
            return self.last(x)

    return make_job(UNet)


@entry("an input that the model normalises in place, with whole numbers beside it")
def input_normalised_in_place() -> paceline.Job:
    class Normalising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.net = nn.Embedding(9, FEATURES), Net()

        def forward(self, x: Tensor, kind: Tensor) -> Tensor:
            x.sub_(0.5).div_(2.0)
            return self.net(x + self.embedding(kind.add_(1)))

    x, kinds, y = numbers(SAMPLES, FEATURES), integers(8, SAMPLES), numbers(SAMPLES, 3, seed=3)
    return make_job(
        Normalising, data=[({"x": a, "kind": b}, t) for a, b, t in zip(x, kinds, y, strict=True)]
    )
