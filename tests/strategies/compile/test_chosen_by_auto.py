"""A run without a plan gets compiled blocks where they pay, and trains under them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from jobs.compiled import compiled_job, traced, traced_with_means
from torch import nn

import paceline
from paceline.api import auto, calibration
from paceline.cluster.cluster import Cluster
from paceline.job import Job
from paceline.planner import search
from paceline.planner.corrections import Calibration
from paceline.strategies.compile import run as compile_run
from paceline.strategies.plan import Plan

pytestmark = [pytest.mark.filterwarnings("ignore:The .grad attribute")]

LONG = 5_000_000  # steps, for blocks of which each gains microseconds and takes 20 seconds to compile, as priced
EAGER_S = 0.03


class Slow(nn.Module):
    """Takes long as Python runs it and not as compiled code: what is traced doesn't wait."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            began_s = time.process_time()
            while time.process_time() - began_s < EAGER_S:
                pass
        return x + torch.tanh(self.linear(x)) * torch.sigmoid(x)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Slow) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block()])
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks[0](x))


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_run, "inductor", traced)
    monkeypatch.setattr(compile_run, "inductor_with_means", traced_with_means)


def a_job(steps: int) -> Job:
    return compiled_job(Net, steps=steps, drop_last=True)


@pytest.mark.slow
def test_a_trial_shows_what_compiled_code_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that tracing it takes longer than a step."""
    monkeypatch.setattr(calibration, "FEWEST_LATE_STEPS", 8)
    monkeypatch.setattr(calibration, "LATE_TURN_S", 0.1)
    plain, compiled = (
        calibration.calibrate(a_job(LONG), Cluster.local("cpu:0"), Plan.parse(plan), 0.1)
        for plan in ("single", "single compile=blocks")
    )
    assert compiled.step_s < plain.step_s > EAGER_S < compiled.start_s


@pytest.mark.slow
def test_a_long_run_is_planned_and_trained_with_compiled_blocks(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """What calibrations measure is given, as it depends on the machine: steps a third shorter, after 20 seconds."""

    def calibrated(job: Job, where: Cluster, plan: Plan, expected_s: float) -> Calibration:
        if (
            plan.modifiers.compile == "none" or "servers" in plan.values()
        ):  # a run of servers sums up no compilations
            return Calibration(0.03, 10, start_s=1.0)
        return Calibration(0.02, 10, start_s=20.0)

    monkeypatch.setattr(calibration, "calibrate", calibrated)
    monkeypatch.setattr(search, "GAIN_SPREAD", 0.0)
    chosen = auto.choose(
        a_job(LONG), None, devices="cpu:0-1", procs=None, memory=None, environment=None
    )
    assert chosen.plan.modifiers.compile == "blocks"
    assert (
        chosen.estimate is not None
        and chosen.estimate.is_measured
        and chosen.estimate.start_s == 20.0
    )

    monkeypatch.setattr("paceline.api.auto.choose", lambda *args, **options: chosen)
    summary = paceline.train(a_job(3), run=tmp_path)
    assert summary["plan"] == str(chosen.plan) and summary["compile"]["compiled"] > 0


def test_a_short_run_is_not_compiled() -> None:
    """Compiling takes longer than all its steps together gain."""
    chosen = auto.choose(
        a_job(1000), None, devices="cpu:0-1", procs=None, memory=None, environment=None
    )
    assert chosen.plan.modifiers.compile == "none"
