"""fp8 through torchao, emulated: plans that cut the batch compute what one device does."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.mixed_precision import mixed_precision_job
from later import not_installed
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.base.errors import JobError, PlanError
from paceline.model.float8 import in_float8, left_in_bf16

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason=not_installed("torchao")
)


def trained(plan: str, run: Path, **changes: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    job = mixed_precision_job(
        precision="fp8",
        optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9),
        **changes,
    )
    paceline.train(job, plan, run=run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], load_file(run / "model.safetensors")


@pytest.mark.slow
@needs_torchao
def test_plans_equal_one_device(tmp_path: Path) -> None:
    """Scales are of rows, so no plan moves them; rounding to float8 moves the run away from bf16."""
    losses, weights = trained("single", tmp_path / "single")
    bf16 = mixed_precision_job(
        precision="bf16", optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9)
    )
    paceline.train(bf16, "single", run=tmp_path / "bf16")
    in_bf16 = load_file(tmp_path / "bf16" / "model.safetensors")
    away = max((in_bf16[name] - w).abs().max() for name, w in weights.items())

    assert (
        all(w.dtype == torch.float32 for w in weights.values()) and weights.keys() == in_bf16.keys()
    )
    for plan in ("data=2 microbatches=2", "shard=2 recompute=full"):
        plan_losses, plan_weights = trained(plan, tmp_path / plan)
        assert plan_losses == pytest.approx(losses, rel=2e-3)
        assert max((plan_weights[name] - w).abs().max() for name, w in weights.items()) < away / 2


@needs_torchao
def test_layers_that_do_not_fit_stay_and_are_named() -> None:
    """Sides that are no multiples of 16, classes of one's own, hooks; weights stay the same objects."""

    class Own(nn.Linear):
        pass

    hooked = nn.Linear(16, 16)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.Sequential(first := nn.Linear(16, 32), nn.Linear(32, 3), Own(16, 16), hooked)
    converted = in_float8(model)

    assert {path: reason.split(",")[0] for path, reason in left_in_bf16(converted).items()} == {
        "1": "has sides of 32 and 3",
        "2": "is a Own",
        "3": "has hooks",
    }
    assert converted[0].weight is first.weight and type(converted[0]).__name__ == "Float8Rows"
    with pytest.raises(
        JobError,
        match="no linear layer of the model can multiply in float8: '0' has sides of 4 and 4",
    ):
        in_float8(nn.Sequential(nn.Linear(4, 4)))


@needs_torchao
@pytest.mark.filterwarnings("ignore")
def test_a_layer_is_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device can do is asked as on a GPU, where torch looks at its process first: nothing traces that."""
    from paceline.model import float8

    monkeypatch.setattr(float8, "_is_native", lambda device: os.getpid() < 0)
    layer = in_float8(nn.Sequential(nn.Linear(16, 32)))
    x = torch.randn(8, 16)
    whole = torch.compile(layer, backend="aot_eager", fullgraph=True)

    assert torch.equal(whole(x), layer(x))


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.model import float8

    float8._layer.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.float8.float8_linear", None)
    with pytest.raises(JobError, match="needs torchao") as caught:
        in_float8(nn.Sequential(nn.Linear(16, 16)))
    assert "[fp8]" in str(caught.value.hint)


@pytest.mark.parametrize("plan", ["tensor=2", "pipeline=2", "place=2"])
def test_recorded_models_are_refused(plan: str) -> None:
    with pytest.raises(PlanError, match='precision="fp8" don\'t compose') as caught:
        paceline.train(mixed_precision_job(precision="fp8"), plan)
    assert "shard=N" in str(caught.value.hint)
