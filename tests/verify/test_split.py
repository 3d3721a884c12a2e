"""Models that are split over ranks compute what one device computes."""

from __future__ import annotations

import pytest
from split_jobs import OWN, TRANSFORMERS, split_job
from verify_jobs import passes

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@pytest.mark.parametrize("name", [*OWN, "gpt2", "llama"])
def test_a_pipeline_of_two(name: str) -> None:
    """Skips, towers, ties, keyword inputs, ignored targets and a short last batch, under the default schedule."""
    passes(split_job(name), "pipeline=2", steps=3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str) -> None:
    """Each on a model with tied embeddings, whose stages' gradients must meet."""
    passes(split_job("tied"), f"pipeline=2 schedule={schedule} microbatches=3", steps=3)


@pytest.mark.parametrize("plan", ["pipeline=2 data=2", "pipeline=2 shard=2", "pipeline=2 shard=2 zero=1 recompute=full",
                                  "pipeline=2 data=2 schedule=zero-bubble", "pipeline=2 data=2 shares=2:1"])
def test_products(plan: str) -> None:
    """Pipelines of replicas, of shards, of unequal parts."""
    passes(split_job("tied"), plan, steps=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*OWN, *TRANSFORMERS])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_model_under_every_schedule(name: str, schedule: str) -> None:
    """Two and four ranks where the model has as many pieces as the plan has stages."""
    job, ranks = split_job(name), [2, 4]
    if name in ("two-tower", "lstm", "unet", "tied") and schedule == "interleaved":
        ranks = [2]
    passes(job, *(f"pipeline={count} schedule={schedule}" for count in ranks), steps=2)
