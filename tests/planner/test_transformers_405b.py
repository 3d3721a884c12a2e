"""Llama 3.1 405B as Transformers builds it, on as many H100 as it was trained on."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from later import Later, not_installed
from torch import Tensor

import paceline as pl
from paceline.cluster.cluster import Cluster
from paceline.model.cost.profile import Profile
from paceline.planner.estimate import Estimate, estimate
from paceline.planner.problem import PlanningProblem
from paceline.strategies.plan import Plan

transformers = Later("transformers")
pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason=not_installed("transformers")
)

LAYERS, SEQUENCE, BATCH = 126, 8192, 2048
CLUSTER = Cluster.parse("2048x8xH100")
# The paper's axes, and the fastest of other axes that a search over all plans finds (see the slow test).
PAPERS = (
    "pipeline=16 data=128 tensor=8 schedule=interleaved microbatches=16 virtual=4 recompute=full"
)
OTHERS = (
    "pipeline=4 data=16 shard=32 tensor=8 zero=2 schedule=interleaved microbatches=4 virtual=4 recompute=full",
    "pipeline=8 shard=256 tensor=8 zero=1 schedule=interleaved microbatches=8 virtual=4 recompute=full",
    "data=128 shard=16 tensor=8 recompute=full",
)


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens = torch.zeros(SEQUENCE, dtype=torch.int64)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, tokens


def job(layers: int) -> pl.Job:
    """Under autocast."""
    config = transformers.LlamaConfig(
        hidden_size=16384,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        intermediate_size=53248,
        vocab_size=128256,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )

    def loss(output: object, labels: Tensor) -> Tensor:
        logits: Tensor = output.logits  # type: ignore[attr-defined]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    return pl.Job(
        model=lambda: transformers.LlamaForCausalLM(config),
        data=Tokens(),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
        batch=BATCH,
        steps=1000,
        precision="bf16",
    )


def with_layers(profile: Profile, layers: int) -> Profile:
    """The profile of a model with so many of the layer that is repeated."""
    (repeated,) = (segment for segment in profile.segments if segment.repeat > 1)
    parameters = tuple(
        replace(p, count=layers) if p.unit == repeated.unit else p for p in profile.parameters
    )
    more = sum(p.num_bytes * p.count for p in parameters) / profile.parameter_bytes
    return replace(
        profile,
        parameters=parameters,
        update=profile.update.times(more),
        segments=tuple(
            replace(segment, repeat=layers) if segment is repeated else segment
            for segment in profile.segments
        ),
    )


@pytest.mark.slow
def test_the_papers_axes_are_near_the_best():
    """Within 10 %. Layers that are alike are traced once, so that few stand for all."""
    problem = PlanningProblem.of(job(4))
    profile = with_layers(problem.pieces.layers(), LAYERS)
    assert sum(p.num_bytes * p.count for p in profile.parameters) == 4 * 405_853_388_800

    def price(text: str) -> Estimate:
        return estimate(
            profile, Plan.parse(text), CLUSTER, batch=BATCH, precision=problem.computes_in
        )

    papers, others = price(PAPERS), [price(text) for text in OTHERS]
    assert papers.fits
    assert papers.step_s <= 1.1 * min(other.step_s for other in others if other.fits)


@pytest.mark.slow
def test_a_search_over_all_plans_finds_the_papers_axes():
    """Among the plans within 10 % of the best."""
    ranked_plans = PlanningProblem.of(job(LAYERS)).search(CLUSTER)
    near = [
        candidate.plan
        for candidate in ranked_plans.ranked
        if candidate.estimate.step_s <= 1.1 * ranked_plans.ranked[0].estimate.step_s
    ]
    assert (8, 16, 128) in {(plan.axes.tensor, plan.axes.pipeline, plan.replicas) for plan in near}
