"""A long list of equal blocks is left out of the model that is looked at, and the price is that of all blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from paceline.cluster.cluster import Cluster
from paceline.job import Job
from paceline.model.cost import trace
from paceline.model.cost.repeated_layers import Chain
from paceline.model.cost.trace import profile_job
from paceline.planner.pieces import LazyPieces
from paceline.planner.problem import PlanningProblem
from paceline.strategies.stages.price import SplitJob
from tests.model.cost.test_blocks import LENGTH, Llama, Small, make_job, same

LAYERS = 12


class Long(Llama):
    """Goes through its list, whatever is in it. around: what it does to a block's output."""

    around: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda x: x)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = mask[:, None, None, :].bool() & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        x = self.embed(ids)
        for layer in self.layers:
            x = self.around(layer(x, seen))
        return self.head(self.norm(x))


class TakingTurns(Long):
    """Sees everything in every third layer, which is wider."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        for number in range(0, layers, 3):
            self.layers[number].down = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))


class Last(Long):
    """Has one more list, and a first block that is different."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.layers[0].down = nn.Linear(64, 32)
        self.more = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, mask) + self.more(self.embed(ids)).mean()


class Between(Long):
    """Does something between two blocks."""

    around = staticmethod(lambda x: 0.5 * x)


class Collecting(Long):
    """Returns what all blocks made."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        made = [self.embed(ids)]
        for layer in self.layers:
            made.append(layer(made[-1]))
        return self.head(self.norm(torch.stack(made).mean(0)))


class Skipping(Long):
    """Adds the first half's outputs to the second half's inputs, the other way round, after all blocks of the first."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x, made = self.embed(ids), []
        half = len(self.layers) // 2
        for layer in self.layers[:half]:
            made.append(x := layer(x))
        for layer in self.layers[half:]:
            x = layer(x, scale=1.0) + made.pop()
        return self.head(self.norm(x))


class Counting(Long):
    """Knows how many blocks there are."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for number in range(LAYERS):
            x = self.layers[number](x)
        return self.head(self.norm(x))


class OneMask(Long):
    """Gives its last blocks another mask, by their place."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen, all_seen = (
            mask[:, None, None, :].bool(),
            torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool),
        )
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, seen if number < LAYERS - 2 else all_seen)
        return self.head(self.norm(x))


def planned(job: Job, *, leave_out: bool) -> PlanningProblem:
    """leave_out: whether blocks may be left out."""
    built = trace.fake_model(job)
    built.chains = None if leave_out else ()
    profile = profile_job(job, built=built)
    return PlanningProblem(job, profile, LazyPieces(job, profile, built))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "chains"),
    [
        (partial(Long, LAYERS, block=Small), (Chain("layers", LAYERS, 4, 1),)),
        (partial(Long, LAYERS), (Chain("layers", LAYERS, 4, 1),)),
        (partial(Long, LAYERS, rank=4), (Chain("layers", LAYERS, 4, 1),)),
        (partial(TakingTurns, 23), (Chain("layers", 23, 11, 3),)),
        (partial(Last, LAYERS), (Chain("layers", LAYERS, 4, 1), Chain("more", LAYERS, 4, 1))),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_price_is_that_of_the_whole_list(
    model: Callable[[], nn.Module], chains: tuple[Chain, ...], precision: str
):
    """To the byte and FLOP: whole, cut, and what a plan costs."""
    job = make_job(model, precision=precision)
    short, whole = (planned(job, leave_out=leave_out) for leave_out in (True, False))
    assert short.pieces.built is not None and short.pieces.built.chains == chains
    same(short.profile, whole.profile)
    same(short.pieces.layers(), whole.pieces.layers())
    assert short.pieces.count(each=False) == whole.pieces.count(each=False)
    assert short.pieces.count() == whole.pieces.count()
    rankings = [
        [
            (candidate.plan, candidate.estimate)
            for candidate in problem.search(Cluster.parse("4xH100")).ranked
        ]
        for problem in (short, whole)
    ]
    assert rankings[0] == rankings[1]


NO_CHAINS = [
    Between,
    Collecting,
    Skipping,
    Counting,
    OneMask,
    partial(Llama, scales=(1.0,) * LAYERS),
]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("model", NO_CHAINS)
def test_what_is_no_chain_is_looked_at_whole(model: Any):
    """Operators between blocks, outputs that are used again, numbers of blocks, and places in the list."""
    job = make_job(lambda: model(LAYERS, block=Small))
    short, whole = (planned(job, leave_out=leave_out) for leave_out in (True, False))
    assert short.pieces.built is not None and short.pieces.built.chains == ()
    same(short.profile, whole.profile)


def test_blocks_that_are_left_out_are_called_once(monkeypatch: pytest.MonkeyPatch):
    """So that planning takes hardly longer for more of them. A capture doesn't have them at all."""
    calls: list[nn.Module] = []
    plain = Small.__call__

    def counts(layers: int) -> tuple[int, int]:
        job = make_job(lambda: Long(layers, block=Small), precision="bf16")
        with monkeypatch.context() as patch:
            patch.setattr(
                Small,
                "__call__",
                lambda self, *args, **more: calls.append(self) or plain(self, *args, **more),
            )
            calls.clear()
            problem = planned(job, leave_out=True)
        captured = SplitJob(job, problem.profile, each=False, built=problem.pieces.built)
        assert len(captured.pieces) > layers
        return len(calls), len(captured.example.pieces)

    few, many = counts(20), counts(60)
    assert many[0] == few[0] + 40 and many[1] == few[1]


def test_the_model_has_all_its_blocks_afterwards():
    """Without the hooks that looked at them."""
    built: list[nn.Module] = []
    job = make_job(lambda: built.append(Long(LAYERS, block=Small)) or built[-1])
    problem = PlanningProblem.of(job)
    problem.pieces.layers()
    assert problem.pieces.built is not None and problem.pieces.built.chains
    assert len(built) == 1 and len(built[0].layers) == LAYERS  # type: ignore[arg-type]
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in built[0].modules()
    )
