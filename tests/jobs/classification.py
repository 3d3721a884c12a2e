"""A job of three classes, and odd models for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from jobs.data import three_classes
from jobs.perceptrons import ListedPerceptron

SAMPLES, BATCH = 25, 8  # an epoch ends with a single sample: fewer than the ranks


def classification_job(
    model: Callable[[], nn.Module] = ListedPerceptron, *, samples: int = SAMPLES, **changes: Any
) -> paceline.Job:
    """A job on 6 numbers a sample and 3 classes, with plain SGD; of 9 epochs unless steps are given."""
    fields = {
        "model": model,
        "data": three_classes(samples),
        "loss": F.cross_entropy,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "batch": BATCH,
        **({} if "steps" in changes else {"epochs": 9}),
    }
    return paceline.Job(**{**fields, **changes})


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1)


def passes(job: paceline.Job, *plans: str, steps: int = 2) -> None:
    """All plans get their certificates, in float64 alone and without a resume: tests of their own are about those."""
    exact = replace(job, precision="float64") if job.precision == "float32" else job
    failed = [
        certificate.describe()
        for certificate in paceline.verify(exact, plans, steps=steps, restore="no")
        if not certificate.passed
    ]
    assert not failed, "\n".join(failed)


def failure_text(job: paceline.Job, plan: str, *, steps: int = 2) -> str:
    """What verify says of a plan that must fail, in float64 and without a resume."""
    (certificate,) = paceline.verify(
        replace(job, precision="float64"), [plan], steps=steps, restore="no"
    )
    described = certificate.describe()
    assert not certificate.passed, described
    return " ".join(described.split())  # its lines wrap


class ConvNet(nn.Module):
    """Convolutions in the memory format of images, an odd kernel count and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(1, 5, 2), nn.GELU(), nn.Conv2d(5, 4, 2)).to(
            memory_format=torch.channels_last
        )
        self.weight = nn.Parameter(torch.randn(3, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        image = (
            x.unflatten(1, (1, 3, 2))
            .repeat(1, 1, 1, 2)
            .contiguous(memory_format=torch.channels_last)
        )
        return self.convs(image).mean((2, 3)) @ self.weight


class Scaled(nn.Module):
    """Scalars in a block and at the root, an empty parameter, and one of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6)])
        self.layers[0].temperature = nn.Parameter(torch.tensor(2.0))
        self.layers[0].register_parameter(
            "shift", nn.Parameter(torch.zeros(6, dtype=torch.float64))
        )
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 4))
        self.out = nn.Linear(6, 3)
        self.layers[0].register_forward_hook(
            lambda layer, _, y: torch.tanh(y * layer.temperature + layer.shift.to(y.dtype))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers[0](x)) * self.scale + self.nothing.sum()


class Experts(nn.Module):
    """Each sample is sent to one of the experts; a small batch leaves some of them unused."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        out, choice = torch.zeros_like(x), (x[:, 0] * 2).long().abs() % len(self.experts)
        for number, expert in enumerate(self.experts):
            if (choice == number).any():
                out[choice == number] = expert(x[choice == number])
        return x + out


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Experts(), Experts()])
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Tagger(nn.Module):
    """Token ids in a mapping to logits in a mapping; input and output embeddings are one."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, sparse=sparse)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(8, 11, bias=False)
        if not sparse:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Any]:
        h = self.embed(ids) * mask.unsqueeze(-1)
        for block in self.blocks:
            h = block(h)
        return {"logits": self.head(h), "layers": len(self.blocks)}


class Sentences(Dataset[Any]):
    """21 sentences of 5 tokens; every fourth has no label at all, the others some."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> Any:
        ids = torch.arange(5) * (index + 3) % 11
        target = ids.roll(1)
        target[: (index % 4) * 2] = -100
        return {"ids": ids, "mask": (torch.arange(5) < 5 - index % 2).float()}, target


def token_loss(output: dict[str, Any], target: Tensor) -> tuple[Tensor, Tensor]:
    """Ignored targets, spread unevenly."""
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten(), reduction="sum"), (
        target != -100
    ).sum()


def tagging_job(**changes: Any) -> paceline.Job:
    return classification_job(Tagger, data=Sentences(), loss=token_loss, **changes)


class Pair(nn.Module):
    """Two inputs, two outputs; the encoder is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).requires_grad_(False)
        self.blocks = nn.ModuleList([nn.Bilinear(6, 6, 4), nn.Linear(4, 3)])

    def forward(self, a: Tensor, b: Tensor) -> Sequence[Tensor]:
        both = self.blocks[0](self.encoder(a), b)
        return self.blocks[1](torch.tanh(both)), both


class Series(nn.Module):
    """An LSTM with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 5, num_layers=2, dropout=0.5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x.unflatten(1, (3, 2)))[0][:, -1])
