"""verify measures its yardstick in the job's precision: sound plans pass, and a mistake is found in each."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from jobs import data, make_job, token_sum

import paceline
from paceline.strategies.data.run import GradientBuckets

PRECISIONS = ("fp16", *(pytest.param(precision, marks=pytest.mark.slow) for precision in ("tf32", "bf16")),
              pytest.param("fp8", marks=[pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(
                  importlib.util.find_spec("torchao") is None, reason="torchao is not installed")]))
pytestmark = pytest.mark.timeout(300)  # each proves two plans


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_mistake_is_found_in_every_precision(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound plans pass; gradients of a sum in place of a mean don't, in the job's own precision and in float64."""
    job = make_job(precision=precision, clip=0.5)
    sound = paceline.verify(job, ["shard=2"], steps=2)
    finish = GradientBuckets.finish

    def wrong(buckets: GradientBuckets) -> None:
        finish(buckets)
        torch._foreach_mul_([p.grad for p in buckets.parameters if p.grad is not None], 2.0)

    monkeypatch.setattr(GradientBuckets, "finish", wrong)
    (planted,) = paceline.verify(job, ["data=2"], steps=2)

    assert all(certificate.passed for certificate in sound), [certificate.describe() for certificate in sound]
    assert [verdict.precision for verdict in planted.verdicts] == [precision, "float64"]
    assert not any(verdict.passed for verdict in planted.verdicts), planted.describe()


def test_skipped_steps_are_verified() -> None:
    """One device and the plan skip the same steps."""
    job = make_job(data=data(largest=8.0), loss=token_sum, optimizer=lambda named: torch.optim.SGD(named, lr=0.02))
    found = paceline.verify(job, ["data=2 accumulate=2"], steps=5)

    assert all(certificate.passed for certificate in found), [certificate.describe() for certificate in found]
