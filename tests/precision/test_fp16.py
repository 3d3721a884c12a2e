"""fp16 with loss scaling is torch's GradScaler on one device, under every plan that it composes with."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.mixed_precision import ByHand, by_hand, data, mixed_precision_job, token_sum
from safetensors.torch import load_file

import paceline
from paceline.base.errors import PlanError
from paceline.launch.process.failure import RankFailed
from paceline.training import scaling
from paceline.training.scaling import LossScale

OVERFLOWS = data(largest=8.0)  # at scales of 2**16 and some below


def trained(
    job: paceline.Job, plan: str, run: Path, **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The summary, the lines of the steps, and the weights."""
    paceline.train(job, plan, run=run, **options)
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return summary, [line for line in lines if "loss" in line], load_file(run / "model.safetensors")


def check(job: paceline.Job, expected: ByHand, actual: Any, *, atol: float = 1e-3) -> None:
    summary, lines, weights = actual
    assert [line["loss_scale"] for line in lines] == expected.scales
    assert [line.get("skipped", False) for line in lines] == expected.skipped
    assert summary["skipped_steps"] == sum(expected.skipped)
    assert lines[-1]["lr"] == pytest.approx(expected.rate)
    assert [line["loss"] for line in lines] == pytest.approx(expected.losses, rel=5 * atol)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=atol)


# The pieces that a batch is cut into decide what overflows: a product of float16 sums over the samples of its piece.
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("plan", "pieces", "clip"),
    [
        ("single", 1, None),
        ("data=2", 2, None),
        ("shard=2", 2, None),
        ("data=2 microbatches=2", 4, 0.1),
        ("pipeline=2", 4, None),
        ("tensor=2", 1, 0.1),
        ("place=2", 1, None),
        pytest.param("shard=2 recompute=full", 2, 0.1, marks=pytest.mark.slow),
        pytest.param("data=2 shard=2 zero=1", 4, 0.1, marks=pytest.mark.slow),
        pytest.param(
            "pipeline=2 data=2 schedule=zero-bubble microbatches=2", 4, 0.1, marks=pytest.mark.slow
        ),
    ],
)
def test_steps_are_those_of_grad_scaler(
    plan: str, pieces: int, clip: float | None, tmp_path: Path
) -> None:
    """The first steps overflow and are skipped: no weight, no optimizer state and no learning rate moves in them."""
    job = mixed_precision_job(
        data=OVERFLOWS,
        clip=clip,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.02, momentum=0.9),
    )
    expected = by_hand(job, accumulate=pieces)

    assert 0 < sum(expected.skipped) < 5
    check(job, expected, trained(job, plan, tmp_path / "run"))


def test_compressed_gradients_overflow_alike(tmp_path: Path) -> None:
    """int8 has no infinity, and says that a block is not finite."""
    job = mixed_precision_job(
        data=OVERFLOWS, optimizer=lambda named: torch.optim.SGD(named, lr=0.02)
    )
    check(
        job,
        by_hand(job, accumulate=2),
        trained(job, "data=2 compress=int8", tmp_path / "run"),
        atol=0.03,
    )


@pytest.mark.slow
def test_goes_on_under_another_plan(tmp_path: Path) -> None:
    """The scale, the steps since it changed and the schedule are in the checkpoint."""
    job = mixed_precision_job(
        data=OVERFLOWS, optimizer=lambda named: torch.optim.SGD(named, lr=0.02, momentum=0.9)
    )
    expected = by_hand(job, accumulate=2)

    trained(replace(job, steps=4), "data=2", tmp_path / "run")
    assert sum(expected.skipped[:4]) > 0
    check(job, expected, trained(job, "shard=2", tmp_path / "run", resume=True))


def test_a_sum_is_scaled_as_its_mean_would_be(tmp_path: Path) -> None:
    """(sum, count) under replicas: the same steps are skipped as on one device, and weights are those of float32."""
    job = mixed_precision_job(
        loss=token_sum, optimizer=lambda named: torch.optim.SGD(named, lr=0.1), clip=0.5
    )
    _, _, float32 = trained(replace(job, precision="float32"), "single", tmp_path / "float32")

    for plan in ("single", "data=2 microbatches=2"):
        summary, _, weights = trained(job, plan, tmp_path / plan)
        assert summary["skipped_steps"] == 0
        for name, weight in float32.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=5e-3)


class Broken(torch.nn.Linear):
    """Its output is not finite from a forward on."""

    def __init__(self) -> None:
        super().__init__(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * math.nan


def test_a_loss_that_stays_nan_is_refused(tmp_path: Path) -> None:
    """After as many steps as there are scales from 2**16 to 1."""
    with pytest.raises(
        RankFailed, match=r"\(NaN\) in step 17 at a loss scale of 1, .* 17 steps in a row"
    ):
        paceline.train(mixed_precision_job(model=Broken, steps=20), "single", run=tmp_path / "run")


@pytest.mark.parametrize(
    ("plan", "hint"),
    [
        ("servers=1 workers=2", "data=N"),
        ("data=2 local=2", "data=N"),
        ("data=2 compress=topk", "int8"),
    ],
)
def test_plans_without_one_decision_are_refused(plan: str, hint: str) -> None:
    with pytest.raises(PlanError, match='precision="fp16" don\'t compose') as caught:
        paceline.train(mixed_precision_job(), plan)
    assert hint in str(caught.value.hint)


def test_an_optimizer_with_a_closure_is_refused() -> None:
    with pytest.raises(RankFailed, match="LBFGS evaluates the loss itself"):
        paceline.train(
            mixed_precision_job(
                optimizer=lambda named: torch.optim.LBFGS([p for _, p in named]), lr_schedule=None
            ),
            "single",
        )


def test_scales_are_those_of_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth after 2000 updates in a row, here after 40, half after an overflow, in any order."""
    assert torch.amp.GradScaler("cpu").get_growth_interval() == scaling.GROWTH_INTERVAL
    monkeypatch.setattr(scaling, "GROWTH_INTERVAL", 40)
    loss_scale, grad_scaler = LossScale(), torch.amp.GradScaler("cpu", growth_interval=40)
    optimizer = torch.optim.SGD([p := torch.nn.Parameter(torch.ones(1))], lr=0.0)
    overflows = {1, 5, 6, 50, 91}
    for step in range(150):
        assert loss_scale.scale == grad_scaler.get_scale(), step
        p.grad = grad_scaler.scale(torch.full((1,), math.inf if step in overflows else 1.0))
        gradient = p.grad.clone()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        overflow = loss_scale.unscale([gradient], torch.device("cpu"))
        loss_scale.update(is_skipped=bool(overflow), count=1.0, loss=0.0, step=step)
    assert loss_scale.skipped_steps == 5


def test_all_kinds_of_gradients_are_unscaled() -> None:
    """Dense ones of any dtype, sparse and complex ones."""
    scale = LossScale()
    sparse = torch.sparse_coo_tensor(
        [[0, 0, 2]], torch.full((3, 2), scale.scale), (4, 2), check_invariants=True
    )
    gradients = [
        torch.full((2,), scale.scale, dtype=torch.float64),
        sparse,
        torch.full((2,), scale.scale * (1 + 2j), dtype=torch.complex64),
    ]

    assert not scale.unscale(gradients, torch.device("cpu"))
    assert gradients[0].tolist() == [1.0, 1.0] and gradients[1].to_dense()[0].tolist() == [2.0, 2.0]
    assert gradients[2].tolist() == [1 + 2j, 1 + 2j]
    sparse._values()[1] = math.nan
    assert scale.unscale(gradients, torch.device("cpu"))
