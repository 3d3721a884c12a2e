"""Weights that land while a forward goes on: whatever looks at one waits for it, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.servers.connection import served_parameters
from paceline.servers.lazy_weights import WeightArrivals
from paceline.servers.shard_memory import bytes_of
from paceline.strategies.server.shards import Shard, assign


class Instant:
    """A link whose weights are there at once: 7 everywhere."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.versions, self.filled_s = shard, [3], 0.0
        self.received = [
            torch.full((chunk.stop - chunk.start,), 7, dtype=getattr(torch, chunk.wire_dtype))
            for chunk in shard.chunks
        ]
        self.received_bytes = [bytes_of(chunk) for chunk in self.received]
        self.requested_versions: list[int] = []

    def ask(self, version: int, optimizer: str | None = None) -> None:
        self.requested_versions.append(version)

    def is_complete(self) -> bool:
        return False

    def wait(self, number: int) -> None:
        """It is there."""


def _arrivals(model: nn.Module, *, servers: int = 2, compress: str = "none") -> WeightArrivals:
    parameters = dict(model.named_parameters())
    shards = assign(served_parameters(parameters), servers, compress=compress, chunk_bytes=64)
    arrivals = WeightArrivals(parameters, [Instant(shard) for shard in shards])  # type: ignore[misc]
    arrivals.ask(3)
    arrivals.begin()
    return arrivals


class Odd(nn.Module):
    """Uses parameters in every way but by calling the module that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.tied, self.late = (
            nn.Linear(4, 4),
            nn.Linear(4, 4, bias=False),
            nn.Linear(4, 4),
        )
        self.scale = nn.Parameter(torch.zeros(()))
        self.row = self.late.weight.detach()[1]  # a view, made before anything came
        self.seen: list[set[str]] = []

    def forward(self, x: torch.Tensor, arrivals: WeightArrivals) -> torch.Tensor:
        assert "scale" not in arrivals.pending  # its own
        for look in (
            lambda: F.linear(x, self.inner.weight),
            lambda: x @ self.tied.weight.T,
            lambda: x + self.row,
            lambda: torch.cat([x, self.inner.bias.expand(1, 4)]),
        ):
            before = set(arrivals.pending)
            assert bool((look() >= 7).any())
            self.seen.append(before - set(arrivals.pending))
        return x


def test_whatever_looks_at_a_parameter_waits_for_it():
    """Functions, transposes, old views and expansions; and for no other parameter."""
    model = Odd()
    for p in model.parameters():
        p.data.zero_()
    arrivals = _arrivals(model)
    with arrivals.watched(model):
        model.zero_grad()
        assert model.scale.shape == () and len(arrivals.pending) == 6
        model(torch.ones(1, 4), arrivals)
    assert model.seen == [{"inner.weight"}, {"tied.weight"}, {"late.weight"}, {"inner.bias"}]
    arrivals.settle()
    assert arrivals.version == 3 and not arrivals.pending
    assert all(bool((p == 7).all()) for p in model.parameters())


def test_modules_wait_for_what_they_hold():
    """A hook does for kernels that torch can't see into."""

    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.values[0]

    model = Kernel()
    model.values = memoryview(model.weight.detach().numpy())  # type: ignore[assignment]
    arrivals = _arrivals(model, servers=1)
    with arrivals.watched(model):
        assert model(torch.zeros(())) == 7


@pytest.mark.parametrize(
    "wrap", [torch.jit.script, lambda model: torch.compile(model, backend="eager")]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_runs_out_of_sight_gets_all_first(wrap: Any):
    """TorchScript and compiled modules."""
    model = nn.Sequential(wrap(nn.Linear(2, 2)), nn.Linear(2, 2))
    arrivals = _arrivals(model)
    with arrivals.watched(model):
        assert not arrivals.pending


class Flat(nn.Module):
    """Its parameters share memory, as those of recurrent layers do on a GPU, and this forward uses none of them."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.zeros(12)
        self.first, self.second = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])


def test_weights_are_settled_when_the_last_one_is_in_place():
    """Before the first backward, while what the model does is still watched: to put one in place is no look at it."""
    model = Flat()
    arrivals = _arrivals(model, servers=1)
    sums: list[float] = []
    arrivals.on_settled = lambda: sums.append(
        sum(float(p.detach().sum()) for p in model.parameters())
    )
    with arrivals.watched(model):
        arrivals.settle()
    assert sums == [12 * 7]


def test_a_next_step_s_weights_change_nothing_of_this_one():
    """What is asked for meanwhile is put in place when the next step begins."""
    model = nn.Linear(3, 3)
    arrivals = _arrivals(model)
    arrivals.settle()
    model.weight.data.zero_()
    arrivals.ask(4)
    with arrivals.watched(model):
        model(torch.ones(1, 3))
    arrivals.settle()
    assert not model.weight.any()
    arrivals.begin()
    arrivals.settle()
    assert bool((model.weight == 7).all())


def test_any_strides_and_a_narrower_wire():
    """Weights in bfloat16, into a parameter whose memory is not in order."""
    model = nn.Linear(5, 3)
    model.weight = nn.Parameter(torch.zeros(5, 3).t())
    arrivals = _arrivals(model, compress="bf16")
    arrivals.settle()
    assert bool((model.weight == 7).all()) and bool((model.bias == 7).all())
