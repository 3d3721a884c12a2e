"""verify measures its yardstick in the job's precision: sound plans pass, and a mistake is found in each."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.mixed_precision import data, mixed_precision_job, token_sum
from later import not_installed
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.strategies.data.run import GradientBuckets
from paceline.training.scaling import LossScale

OTHERS = (
    *(pytest.param(precision, marks=pytest.mark.slow) for precision in ("tf32", "bf16")),
    pytest.param(
        "fp8",
        marks=[
            pytest.mark.slow,
            pytest.mark.timeout(900),
            pytest.mark.skipif(
                importlib.util.find_spec("torchao") is None, reason=not_installed("torchao")
            ),
        ],
    ),
)


@pytest.mark.parametrize("precision", ["fp16", *OTHERS])
def test_a_mistake_is_found_in_every_precision(
    precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of a sum in place of a mean, in the job's own precision and in float64."""
    finish = GradientBuckets.finish

    def wrong(buckets: GradientBuckets) -> None:
        finish(buckets)
        torch._foreach_mul_([p.grad for p in buckets.parameters if p.grad is not None], 2.0)

    monkeypatch.setattr(GradientBuckets, "finish", wrong)
    (planted,) = paceline.verify(
        mixed_precision_job(precision=precision, clip=0.5), ["data=2"], steps=2, restore="no"
    )

    assert [verdict.precision for verdict in planted.verdicts] == [precision, "float64"]
    assert not any(verdict.passed for verdict in planted.verdicts), planted.describe()


@pytest.mark.parametrize("precision", [pytest.param("fp16", marks=pytest.mark.slow), *OTHERS])
def test_sound_plans_pass_in_every_precision(precision: Any) -> None:
    """Those in fp16 below, too, where steps are skipped."""
    certificates = paceline.verify(
        mixed_precision_job(precision=precision, clip=0.5), ["shard=2"], steps=2, restore="no"
    )

    assert all(certificate.passed for certificate in certificates), [
        certificate.describe() for certificate in certificates
    ]


@pytest.mark.slow
def test_skipped_steps_are_verified() -> None:
    """One device and the plan skip the same steps."""
    job = mixed_precision_job(
        data=data(largest=8.0),
        loss=token_sum,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.02),
    )
    certificates = paceline.verify(job, ["data=2 microbatches=2"], steps=5, restore="no")

    assert all(certificate.passed for certificate in certificates), [
        certificate.describe() for certificate in certificates
    ]


def overflowing_whole(**changes: Any) -> paceline.Job:
    """Gradients near 1.5: times 2**16 the sum over a batch is no float16, and that over a half of it is."""
    draws = torch.Generator().manual_seed(5)
    inputs, targets = (torch.rand(48, width, generator=draws) * 0.1 + 1.2 for width in (8, 3))
    return mixed_precision_job(
        model=lambda: nn.Linear(8, 3, bias=False),
        data=TensorDataset(inputs, targets),
        loss=lambda output, target: (output * target).sum(1).mean(),
        lr_schedule=None,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01, momentum=0.9),
        **changes,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "others", [(), pytest.param(("data=3 microbatches=2",), marks=pytest.mark.slow)]
)
def test_a_plan_that_overflows_in_other_steps_is_held_against_a_batch_that_is_cut_alike(
    others: tuple[str, ...], tmp_path: Path
) -> None:
    """The certificate says so. Each step that both take counts, and what is resumed and evaluated in float64."""
    certificates = paceline.verify(
        overflowing_whole(), ["data=2", *others, "single recompute=full"], steps=4, run=tmp_path
    )

    assert all(certificate.passed for certificate in certificates), [
        certificate.describe() for certificate in certificates
    ]
    overflow_note = (
        "step 1 overflows in float16 for the whole batch alone; so in fp16 the plan is held against one "
        "device that"
    )
    assert [overflow_note in (certificate.overflow or "") for certificate in certificates] == [
        True,
        *(True for _ in others),
        False,
    ]
    assert all(certificate.resumed_from for certificate in certificates)
    assert overflow_note.split(";")[0] in (tmp_path / "certificate.txt").read_text()


@pytest.mark.slow
def test_pieces_that_overflow_in_other_steps_are_no_yardstick(tmp_path: Path) -> None:
    """An update moves a weight by 0.014 or more: one that is missing is beyond what a plan may be off by."""
    paceline.verify(overflowing_whole(), ["data=2"], steps=4, restore="no", run=tmp_path)
    yardstick = json.loads((tmp_path / "certificate.json").read_text())["yardstick"]

    assert yardstick["fp16"]["weight"]["tolerance"] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("first_update", [0, 1])
def test_a_gradient_of_a_wrong_scale_is_found_where_other_steps_overflow(
    monkeypatch: pytest.MonkeyPatch, first_update: int
) -> None:
    """In fp16 alone, there is no scale in float64; from the update on that has the mistake first."""
    unscale = LossScale.unscale

    def wrong(scale: LossScale, gradients: Any, device: torch.device) -> torch.Tensor:
        overflow = unscale(scale, gradients, device)
        if scale.grown_steps >= first_update:
            torch._foreach_mul_(list(gradients), 1.1)
        return overflow

    monkeypatch.setattr(LossScale, "unscale", wrong)
    for planted in paceline.verify(
        overflowing_whole(), ["data=2", "single recompute=full"], steps=4, restore="no"
    ):
        assert planted.verdict == "failed", planted.describe()
        assert [verdict.passed for verdict in planted.verdicts] == [False, True]


@pytest.mark.slow
@pytest.mark.checked_runs
def test_a_run_whose_first_step_overflows_for_the_whole_batch_alone_passes_its_check(
    tmp_path: Path,
) -> None:
    paceline.train(overflowing_whole(), "data=2", run=tmp_path / "run")

    assert (
        json.loads((tmp_path / "run" / "summary.json").read_text())["check"]["verdict"] == "passed"
    )
