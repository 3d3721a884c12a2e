"""A captured model that is cut on devices which are not here, against the same model by dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from benchmarks.models import Decoder, DecoderSize, decoder_profile
from paceline.cluster.cluster import Cluster
from paceline.model.cost.profile import Profile
from paceline.model.cost.trace import profile_job
from paceline.planner.estimate import Estimate, estimate
from paceline.planner.pieces import LazyPieces
from paceline.strategies.plan import Plan

SIZE = DecoderSize(8, 2048, 16, 8192, 32000, sequence=1024)


def _job(model: Any = lambda: Decoder(SIZE), **changes: Any) -> paceline.Job:
    tokens = torch.zeros(64, SIZE.sequence, dtype=torch.long)
    return paceline.Job(
        **{
            "model": model,
            "data": TensorDataset(tokens, tokens),
            "batch": 64,
            "steps": 1,
            "loss": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
            "optimizer": lambda named: torch.optim.AdamW(named),
            **changes,
        }
    )


@pytest.fixture(scope="module")
def layers() -> Profile:
    job = _job()
    return LazyPieces(job, profile_job(job)).layers()


@pytest.mark.slow
def test_blocks_that_are_alike_are_one_segment(layers: Profile):
    """With all their parameters, and every product's shape."""
    (blocks,) = (segment for segment in layers.segments if segment.unit)
    assert blocks.repeat == SIZE.layers
    assert layers.parameter_bytes == 4 * SIZE.num_parameters
    for work in (blocks.forward, blocks.backward):
        assert sum(product.flops for product in work.products) == pytest.approx(
            work.flops.per_sample
        )
    assert {p.kind for p in blocks.forward.products} == {"linear", "attention"}


PLANS = {
    "single microbatches=64": 0.03,
    "data=8 microbatches=4": 0.03,
    "shard=8 microbatches=8": 0.05,
    "pipeline=4 data=2 microbatches=16": 0.03,
    "pipeline=4 data=2 microbatches=16 schedule=zero-bubble": 0.15,
    "pipeline=4 schedule=interleaved virtual=2 microbatches=32 shard=2 recompute=full": 0.05,
    "tensor=2 data=4 microbatches=8": 0.15,
}


@pytest.mark.parametrize("text", PLANS)
def test_it_costs_what_the_model_by_dimensions_does(text: str, layers: Profile):
    """Seconds and bytes."""

    def guess(profile: Profile) -> Estimate:
        return estimate(profile, Plan.parse(text), Cluster.parse("8xA100"), batch=64)

    estimated, known = guess(layers), guess(decoder_profile(SIZE))
    assert estimated.step_s == pytest.approx(known.step_s, rel=PLANS[text])
    assert estimated.peak_memory_bytes == pytest.approx(known.peak_memory_bytes, rel=PLANS[text])


class Tapered(nn.Module):
    """No two layers are alike; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 ** (9 - k), 2 ** (8 - k)) for k in range(6)])
        self.layers[5].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.slow
def test_layers_that_differ_are_dealt_by_their_work():
    """The first, which is half of the work, is a stage of its own; what is frozen is held and has no gradient."""
    x = torch.zeros(64, 512)
    job = _job(Tapered, data=TensorDataset(x, x[:, 0].long()), loss=F.cross_entropy)
    profile = LazyPieces(job, profile_job(job)).layers()
    assert profile.parameter_bytes == 4 * sum(p.numel() for p in Tapered().parameters())

    estimated = estimate(
        profile, Plan.parse("pipeline=2 data=2 microbatches=4"), Cluster.parse("4xA100"), batch=64
    )
    first, second = (need.ledger["parameters"] for need in estimated.needs)
    assert first > 2 * second > 0
