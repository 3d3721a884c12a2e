"""A gradient that backward adds to several times leaves when all of it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jobs.stateful import assert_alike, stateful_job
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.base.errors import TrainingError
from paceline.launch.process import rank_process
from paceline.strategies.data.arrivals import GradientArrivals
from paceline.strategies.data.run import GradientBuckets


class Shared(nn.Module):
    """A layer that is used three times, each in a reentrant checkpoint, and large enough for a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = (
            nn.Linear(8, 400),
            nn.Linear(400, 400),
            nn.Linear(400, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + checkpoint(
                torch.tanh, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True
            )
        return self.last(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 microbatches=2",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in ("data=2", "data=3 microbatches=2", "data=2 compress=none recompute=full")
        ),
    ],
)
def test_replicas_over_a_network(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As between hosts: a bucket leaves while backward goes on."""
    monkeypatch.setattr(rank_process, "register", lambda: "gloo")
    assert_alike(stateful_job(Shared, steps=4), plan, tmp_path)


class Looked(nn.Module):
    """A layer that is used three times, one that is left out of every other step, and a table whose gradients torch
    makes sparse though no module says so."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other, self.calls = Shared(), nn.Linear(8, 8), 0
        self.table = nn.Parameter(torch.linspace(-1.0, 1.0, 44).view(11, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        rows = (10 * x[:, 0].abs()).long() % 11
        return self.shared(self.other(x) if self.calls % 2 else x) + F.embedding(
            rows, self.table, sparse=True
        )


def test_gradients_that_backward_leaves_outside_of_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As on GPUs: a bucket takes them when the last of them is there."""
    monkeypatch.setattr(rank_process, "register", lambda: "gloo")
    made = GradientBuckets.__init__

    def copying(buckets: GradientBuckets, *args: Any, **options: Any) -> None:
        made(buckets, *args, **options)
        buckets.copies = True

    monkeypatch.setattr(GradientBuckets, "__init__", copying)
    assert_alike(stateful_job(Looked, steps=4), "data=2", tmp_path)


def test_servers(tmp_path: Path):
    """Chunks leave while backward goes on, too."""
    assert_alike(stateful_job(Shared, steps=4), "servers=1 workers=2", tmp_path)


@pytest.mark.slow
def test_stages_that_share_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two stages of one rank add to it, the second after the last micro-batch of the first."""
    monkeypatch.setattr(rank_process, "register", lambda: "gloo")

    def tied() -> nn.Module:
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4))
        net[0].weight = net[2].weight
        return net

    plan = "data=2 pipeline=2 virtual=2 schedule=interleaved microbatches=2"
    assert_alike(stateful_job(tied, steps=4), plan, tmp_path)


def arrivals(left: set[Any]) -> GradientArrivals:
    return GradientArrivals(lambda parameter: "layer.weight", lambda parameter: parameter in left)


def test_a_parameter_is_learned_to_come_again():
    """The first window shows it; from then on it is never taken for complete, and others are."""
    once, twice = torch.zeros(1), torch.zeros(1)
    gradients = arrivals(set())
    for window in range(3):
        gradients.begin()
        assert [gradients.add(p, last=False) for p in (once, twice)] == [False, False]
        assert [gradients.add(p, last=True) for p in (once, twice, twice)] == [
            window > 0,
            False,
            False,
        ]
        gradients.end()


def test_a_gradient_that_left_too_early_is_an_error():
    """Where a layer comes again for the first time, after its gradient was sent."""
    parameter, left = torch.zeros(1), set[Any]()
    gradients = arrivals(left)
    gradients.begin()
    gradients.add(parameter, last=True)
    gradients.end()
    gradients.begin()
    assert gradients.add(parameter, last=True)
    left.add(parameter)
    with pytest.raises(TrainingError, match=r"added to the gradient of 'layer.weight' again after"):
        gradients.add(parameter, last=True)
