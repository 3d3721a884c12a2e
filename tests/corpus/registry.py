"""What an entry of the corpus is, and how the themed modules add to it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import paceline
from paceline.training.feed import is_stream

THEMES = (
    "optimizers",
    "schedules",
    "data",
    "losses",
    "layers",
    "state",
    "hooks",
    "sharing",
    "attention",
    "recurrent",
    "convolution",
    "structure",
    "experts",
    "checkpointing",
    "libraries",
    "combined",
    "computations",
    "own_steps",
    "training_scripts",
    "training_loops",
    "outside",
)
SAMPLES, BATCH, STEPS, FEATURES = (
    50,
    12,
    6,
    8,
)  # the fifth window has two samples, the sixth begins an epoch


@dataclass(frozen=True, slots=True)
class Entry:
    """A job of the corpus.

    idea: what it tries, in a line. make: builds a fresh job; it evaluates on some of its own samples if on nothing
    else, unless its model can't be evaluated. random_layers: the model draws, so it runs with its random
    layers off. tolerance: how far results may be apart, relative to the largest number of a tensor; None for that of
    the job's precision. needs: a package beside torch. by_hand: of a step of the job's own, what a loop does in its
    place, from models, optimizers, input and target; it returns the loss.
    """

    name: str
    theme: str
    idea: str
    make: Callable[[], paceline.Job]
    random_layers: bool = False
    tolerance: float | None = None
    needs: str | None = None
    by_hand: Callable[..., Tensor] | None = None


_ENTRIES: dict[str, Entry] = {}


def entry(
    idea: str, *, evaluates: bool = True, **options: Any
) -> Callable[[Callable[[], paceline.Job]], Callable[[], paceline.Job]]:
    """Add a function that makes a job to the corpus under its own name."""

    def added(make: Callable[[], paceline.Job]) -> Callable[[], paceline.Job]:
        add(
            make.__name__,
            make.__module__.rpartition(".")[2],
            idea,
            make,
            evaluates=evaluates,
            **options,
        )
        return make

    return added


def add(
    name: str,
    theme: str,
    idea: str,
    make: Callable[[], paceline.Job],
    *,
    evaluates: bool = True,
    **options: Any,
) -> None:
    """Add a job to the corpus. evaluates: whether its model can be evaluated."""
    assert name not in _ENTRIES, f"two jobs are named {name}"
    _ENTRIES[name] = Entry(
        name, theme, idea, partial(_evaluated, make) if evaluates else make, **options
    )


def _evaluated(make: Callable[[], paceline.Job]) -> paceline.Job:
    """The job with validation data: a batch but for one sample, so that ranks get unequal parts."""
    job = make()
    if job.validation is not None or is_stream(job.data):
        return job
    return replace(job, validation=Subset(job.data, range(min(len(job.data), job.batch - 1))))


def entries(pattern: str = "*") -> list[Entry]:
    """Entries whose name or theme matches one of the patterns, separated by commas; those that need a package that
    is not installed are left out."""
    package = __name__.rpartition(".")[0]
    for theme in THEMES:
        importlib.import_module(f"{package}.{theme}")
    wanted = pattern.split(",")
    return [
        each
        for each in _ENTRIES.values()
        if any(fnmatch(each.name, part) or fnmatch(each.theme, part) for part in wanted)
        and (each.needs is None or importlib.util.find_spec(each.needs) is not None)
    ]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """The same normal numbers each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 2) -> Tensor:
    """The same whole numbers below `high` each time."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2, eps=1e-3, weight_decay=0.1)


def make_job(model: Callable[[], nn.Module] | None = None, **changes: Any) -> paceline.Job:
    """A regression of 3 numbers on 8, in float64, with plain SGD; fields can be changed."""
    x = numbers(SAMPLES, FEATURES)
    fields: dict[str, Any] = {
        "model": model or Net,
        "data": TensorDataset(x, torch.tanh(x @ numbers(FEATURES, 3, seed=3))),
        "loss": F.mse_loss,
        "optimizer": sgd,
        "batch": BATCH,
        "steps": STEPS,
        "precision": "float64",
    }
    return paceline.Job(**{**fields, **changes})


class Block(nn.Module):
    """A residual block; what it adds can be given."""

    def __init__(self, body: nn.Module | None = None, width: int = FEATURES) -> None:
        super().__init__()
        self.body = body if body is not None else nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.body(x))


class Net(nn.Module):
    """A layer, residual blocks, a layer. `body` makes what the blocks add."""

    def __init__(
        self,
        body: Callable[[], nn.Module] | None = None,
        *,
        blocks: int = 3,
        width: int = FEATURES,
        outputs: int = 3,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList([Block(body() if body else None, width) for _ in range(blocks)])
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)
