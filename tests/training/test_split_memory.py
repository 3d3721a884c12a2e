"""No rank of a split model needs all of it in memory: to start, to save, to resume, to export."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import paceline
from paceline.checkpoint.read import open_checkpoint
from paceline.launch.process.memory_use import reset_peak, resident_peak_bytes
from paceline.training import loop, state
from paceline.training.prepare import build_in_files, build_model
from paceline.training.settings import Settings

WIDTH, LAYERS = 2048, 32  # 8 MiB each
WHOLE_BYTES = LAYERS * 4 * WIDTH * WIDTH // 2


def make_job(width: int) -> paceline.Job:
    def model() -> nn.Module:
        ups = (
            layer
            for _ in range(LAYERS // 2)
            for layer in (
                nn.Linear(width // 2, width, bias=False),
                nn.Linear(width, width // 2, bias=False),
            )
        )
        return nn.Sequential(*ups)

    data = torch.utils.data.TensorDataset(torch.randn(8, width // 2), torch.randn(8, width // 2))
    return paceline.Job(
        model=model,
        data=data,
        loss=nn.functional.mse_loss,
        batch=8,
        steps=1,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


class Phases:
    """The greatest memory of each phase above what was there before."""

    def __init__(self) -> None:
        reset_peak()
        self.before, self.peaks = resident_peak_bytes(), {}

    def measure(self, name: str, run: Callable[[], Any]) -> Any:
        reset_peak()
        result = run()
        self.peaks[name] = (resident_peak_bytes() - self.before) / WHOLE_BYTES
        return result


def save(run: Any) -> None:
    run.saves.save()
    run.saves.end()


@pytest.mark.slow
@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["pipeline=4", "tensor=4", "shard=4"])
def test_the_whole_model_is_nowhere(
    plan: str, tmp_path: Path, run_ranks: Callable[..., Any]
) -> None:
    """256 MiB on four ranks: each holds 64, and in passing some more. What is stored is the whole."""
    split_plan = paceline.Plan.parse(plan).with_(microbatches=2)

    def body(context: Any) -> dict[str, float]:
        settings = Settings(tmp_path, (1,) * split_plan.replicas, resume=True)
        loop.Loop(
            context, make_job(64), split_plan, Settings(None, settings.shares)
        )  # torch's own, taken once
        phases = Phases()
        run = phases.measure(
            "start", lambda: loop.Loop(context, make_job(WIDTH), split_plan, settings)
        )
        run.run.step = 1
        phases.measure("save", lambda: save(run))
        phases.measure("export", lambda: state.export(run.run.stepper.model, tmp_path, step=1))
        return phases.peaks

    def resume(context: Any) -> dict[str, float]:
        settings = Settings(tmp_path, (1,) * split_plan.replicas, resume=True)
        loop.Loop(context, make_job(64), split_plan, Settings(None, settings.shares))
        phases = Phases()
        run = phases.measure(
            "build", lambda: loop.Loop(context, make_job(WIDTH), split_plan, settings)
        )
        phases.measure("restore", run._restore)
        assert run.run.step == 1
        return phases.peaks

    peaks_by_rank = [*run_ranks(body, 4), *run_ranks(resume, 4)]
    assert all(peak < 0.6 for rank in peaks_by_rank for peak in rank.values()), peaks_by_rank
    parts = list((tmp_path / "checkpoints/step-1").glob("rank-*.safetensors"))
    assert len(parts) == 4 and max(path.stat().st_size for path in parts) < 0.3 * WHOLE_BYTES
    checkpoint = open_checkpoint(tmp_path / "checkpoints/step-1")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as exported:
        for name, p in build_model(make_job(WIDTH), torch.device("cpu")).named_parameters():
            assert torch.equal(checkpoint.read(f"parameters/{name}"), p), name
            assert torch.equal(exported.get_tensor(name), p), name


class Grown(nn.Module):
    """Grows a tensor in place, which one in a file can't."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(512, 64).resize_(600, 64).fill_(2.0))


def test_a_model_that_files_cannot_hold(caplog: pytest.LogCaptureFixture) -> None:
    """It is built in memory, and that is said."""
    job = dataclasses.replace(make_job(64), model=Grown)
    mapped, model = build_in_files(job, torch.device("cpu"))
    assert mapped is None and torch.equal(model.w, Grown().w)
    assert (
        "takes memory for the whole model to begin with: it could not be built in files (RuntimeError"
        in caplog.text
    )


def test_weights_that_torch_did_not_make(caplog: pytest.LogCaptureFixture) -> None:
    """What they take is said."""

    def model() -> nn.Module:
        made = nn.Linear(2, 2)
        made.large = nn.Parameter(torch.from_numpy(np.ones((2400, 2400))))
        return made

    build_in_files(dataclasses.replace(make_job(64), model=model), torch.device("cpu"))
    assert "takes 46 MB for the whole model to begin with" in caplog.text


def test_the_users_own_error_is_the_users(caplog: pytest.LogCaptureFixture) -> None:
    """It comes as it is."""

    def model() -> nn.Module:
        raise KeyError("size")

    with pytest.raises(KeyError, match="size"):
        build_in_files(dataclasses.replace(make_job(64), model=model), torch.device("cpu"))
