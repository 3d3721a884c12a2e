"""Jobs of different kinds whose every plan is small enough to be measured: what binds a step differs from one to
another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline as pl
from benchmarks.models.convnet import ConvNet
from benchmarks.models.convolution import ConvNetSize
from benchmarks.models.decoder import Decoder
from benchmarks.models.sizes import DecoderSize

STEPS = 1_000_000  # a run says itself how many it takes


class Rows(Dataset):
    """The same few samples over and over: reading them costs next to nothing."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def tokens(size: DecoderSize, *, samples: int = 64) -> Rows:
    inputs = torch.randint(
        size.vocab, (samples, size.sequence), generator=torch.Generator().manual_seed(0)
    )
    return Rows(inputs, inputs.roll(-1, 1))


def numbers(*shape: int, classes: int = 10, samples: int = 256) -> Rows:
    generator = torch.Generator().manual_seed(0)
    return Rows(
        torch.randn(samples, *shape, generator=generator),
        torch.randint(classes, (samples,), generator=generator),
    )


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def adamw(named: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3)  # type: ignore[arg-type]


def momentum(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1e-2, momentum=0.9)  # type: ignore[arg-type]


class Branches(nn.Module):
    """Four branches that need nothing of each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([branch(x) for branch in self.branches], -1))


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1e-2)  # type: ignore[arg-type]


class Towers(nn.Module):
    """Two unequal parts that need nothing of each other: convolutions, and products, of the same image."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 64, 256),
        )
        self.products = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3072, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 256),
        )
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.convolutions(x), self.products(x)], -1))


class Reader(nn.Module):
    """Tokens to a class: a table of embeddings, something in the middle, the mean over the sequence."""

    def __init__(self, vocab: int, width: int, *middle: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(vocab, width),
            nn.ModuleList(middle),
            nn.Linear(width, 10),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x.mean(1))


def _convolutions(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 64, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def words(vocab: int, length: int, *, samples: int = 256) -> Rows:
    generator = torch.Generator().manual_seed(0)
    return Rows(
        torch.randint(vocab, (samples, length), generator=generator),
        torch.randint(10, (samples,), generator=generator),
    )


def perceptron(width: int, layers: int) -> nn.Sequential:
    middle = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *middle, nn.Linear(width, 10))


def _decoder(size: DecoderSize, batch: int) -> Callable[[], pl.Job]:
    return lambda: pl.Job(
        model=lambda: Decoder(size),
        data=tokens(size),
        loss=next_token_loss,
        optimizer=adamw,
        batch=batch,
        steps=STEPS,
    )


def classifier(
    model: Callable[[], nn.Module],
    data: Callable[[], Rows],
    optimizer: Callable[[object], torch.optim.Optimizer],
    batch: int,
) -> Callable[[], pl.Job]:
    return lambda: pl.Job(
        model=model,
        data=data(),
        loss=F.cross_entropy,
        optimizer=optimizer,
        batch=batch,
        steps=STEPS,
    )


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A job and the devices that there are for it.

    memory: the limit of each device. threads: of each rank; by default ranks share the cores.
    """

    num_devices: int
    make: Callable[[], pl.Job]
    memory: str | None = None
    threads: int | None = None

    @property
    def cluster(self) -> pl.Cluster:
        return pl.Cluster.local(f"cpu:0-{self.num_devices - 1}", memory=self.memory)


# By name.
SMALL_JOBS: dict[str, Case] = {
    "GPT, 128 wide": Case(2, _decoder(DecoderSize(4, 128, 4, 512, 256, sequence=128), 16)),
    "GPT, 512 wide": Case(2, _decoder(DecoderSize(2, 512, 8, 2048, 256, sequence=64), 8)),
    "Llama, 256 wide": Case(
        2, _decoder(DecoderSize(4, 256, 8, 688, 1024, sequence=64, kv_heads=4, form="llama"), 16)
    ),
    "ConvNet on 32x32": Case(
        4,
        lambda: pl.Job(
            model=lambda: ConvNet(ConvNetSize(depths=(1, 1, 1, 1), width=16, classes=10, side=32)),
            data=numbers(3, 32, 32),
            loss=F.cross_entropy,
            optimizer=momentum,
            batch=16,
            steps=STEPS,
        ),
    ),
    "wide perceptron": Case(
        2,
        lambda: pl.Job(
            model=lambda: perceptron(2048, 3),
            data=numbers(64),
            loss=F.cross_entropy,
            optimizer=momentum,
            batch=16,
            steps=STEPS,
        ),
    ),
    "small perceptron": Case(
        4,
        lambda: pl.Job(
            model=lambda: perceptron(128, 2),
            data=numbers(64),
            loss=F.cross_entropy,
            optimizer=adamw,
            batch=64,
            steps=STEPS,
        ),
    ),
    "four branches": Case(
        4,
        lambda: pl.Job(
            model=lambda: Branches(768),
            data=numbers(768),
            loss=F.cross_entropy,
            optimizer=adamw,
            batch=64,
            steps=STEPS,
        ),
    ),
}
# Of other classes than those above, on which nothing was fitted.
OTHER_JOBS: dict[str, Case] = {
    "convolutions": Case(
        2, classifier(lambda: _convolutions(64), lambda: numbers(3, 32, 32), momentum, 32)
    ),
    "plain SGD, 4096 wide": Case(
        2, classifier(lambda: perceptron(4096, 3), lambda: numbers(64), sgd, 128)
    ),
    "two towers": Case(2, classifier(Towers, lambda: numbers(3, 32, 32), momentum, 64)),
    "encoder, 256 wide": Case(
        2,
        classifier(
            lambda: Reader(256, 256, *(_layer() for _ in range(4))),
            lambda: words(256, 64),
            adamw,
            16,
        ),
    ),
    "embeddings": Case(
        2,
        classifier(
            lambda: Reader(50_000, 128, nn.Linear(128, 128)), lambda: words(50_000, 64), adamw, 64
        ),
    ),
    "LSTM": Case(
        2,
        classifier(
            lambda: Reader(256, 256, nn.LSTM(256, 256, 2, batch_first=True)),
            lambda: words(256, 64),
            adamw,
            16,
        ),
    ),
}
# 268 million parameters: a step needs 4.3 GB on one device.
LARGE_JOBS: dict[str, Case] = {
    "perceptron, 8192 wide": Case(
        2, classifier(lambda: perceptron(8192, 4), lambda: numbers(64), adamw, 8)
    ),
}
# With a limit of memory that one device needs more than; and with one core for each rank, where one does not win.
SPLIT_JOBS: dict[str, Case] = {
    "wide perceptron, 160 MiB": replace(SMALL_JOBS["wide perceptron"], memory="160MiB"),
    "embeddings, 160 MiB": replace(OTHER_JOBS["embeddings"], memory="160MiB"),
    "GPT, 128 wide, a core each": replace(SMALL_JOBS["GPT, 128 wide"], threads=1),
    "convolutions, a core each": replace(OTHER_JOBS["convolutions"], threads=1),
    "two towers, a core each": replace(OTHER_JOBS["two towers"], threads=1),
}
JOBS = {**SMALL_JOBS, **OTHER_JOBS, **SPLIT_JOBS, **LARGE_JOBS}
