"""Which plan a run gets that nobody gave one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.api import auto, links
from paceline.api.calibration import TRY_S
from paceline.api.plan_choice import is_auto
from paceline.base.errors import PlanError, UsageError
from paceline.cluster.cluster import LOOPBACK
from paceline.launch.hosts.environment import Environment
from paceline.strategies.plan import Plan

WIDTH = 32
INSIDE = Environment("torchrun", 0, 3, 0, 3, "127.0.0.1", 29500)
NOTHING: dict[str, Any] = {"devices": None, "procs": None, "memory": None, "environment": None}


@pytest.fixture(autouse=True)
def known_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are not measured, which takes seconds for each number of ranks."""
    monkeypatch.setattr(links, "measure_link", lambda cluster, num_ranks: LOOPBACK)


class Broken(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no forward")


def a_job(**changes: Any) -> paceline.Job:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    return paceline.Job(
        **{
            "model": lambda: nn.Linear(WIDTH, 4),
            "data": TensorDataset(x, x.argmax(1) % 4),
            "loss": F.cross_entropy,
            "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
            "batch": 16,
            "steps": 3,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, True),
        ("auto", True),
        (" auto ", True),
        ("data=2", False),
        (Plan(), False),
        ("auto.json", False),
    ],
)
def test_auto_is_what_nobody_said_otherwise(given: Any, expected: bool):
    assert is_auto(given) is expected


def test_one_device_leaves_no_choice():
    assert auto.choose(a_job(), None, **{**NOTHING, "devices": "cpu:0"}).plan == Plan()


def test_an_exact_plan_for_the_devices_is_chosen_with_its_reason():
    """Devices that are named are all used; a short run is predicted alone."""
    choice = auto.choose(a_job(), "auto", **{**NOTHING, "devices": "cpu:0-1"})

    assert choice.plan.world_size == 2 and choice.plan.relaxed is None and choice.why
    assert (
        choice.estimate is not None
        and choice.estimate.low_s < choice.estimate.step_s < choice.estimate.high_s
    )


def test_a_count_of_ranks_is_kept():
    assert auto.choose(a_job(), None, **{**NOTHING, "procs": 3}).plan.world_size == 3


def test_inside_a_launcher_each_rank_is_a_replica():
    assert auto.choose(a_job(), None, **{**NOTHING, "environment": INSIDE}).plan == Plan.of(data=3)
    with pytest.raises(UsageError, match=r"plan 'auto' inside torchrun[\s\S]*paceline plan FILE"):
        auto.choose(a_job(), "auto", **{**NOTHING, "environment": INSIDE})


def test_what_cannot_be_priced_is_trained_by_replicas():
    choice = auto.choose(
        a_job(model=lambda: Broken(WIDTH, 4)), None, **{**NOTHING, "devices": "cpu:0-1"}
    )

    assert choice.plan.replicas == 2


def test_nothing_that_fits_is_an_error_with_the_gap():
    with pytest.raises(
        PlanError, match=r"nothing fits on these devices: '.*' is nearest and is [\d,]+ bytes over"
    ):
        auto.choose(a_job(batch=2), None, **{**NOTHING, "devices": "cpu:0-1", "memory": "1MiB"})


def test_no_plan_for_the_devices_is_an_error():
    """A batch of two samples, a model that can't be cut, and three devices that are named."""

    class Branching(nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(PlanError, match="no plan uses all 3 devices"):
        auto.choose(
            a_job(model=lambda: Branching(nn.Linear(WIDTH, 4)), batch=2),
            None,
            **{**NOTHING, "devices": "cpu:0-2"},
        )


def test_a_long_run_is_worth_trying_its_plans(monkeypatch: pytest.MonkeyPatch):
    """A tenth of the predicted run, and no more than ten seconds, but for compiled code."""
    budgets: list[float] = []

    def tried(problem: Any, plans: Any, cluster: Any, *, budget_s: float, **more: Any) -> Any:
        budgets.append(budget_s)
        assert not budget_s or more["late_s"] > budget_s
        return problem, plans

    monkeypatch.setattr("paceline.api.auto.try_best", tried)
    for steps in (3, 10_000_000):
        choice = auto.choose(a_job(steps=steps), None, **{**NOTHING, "devices": "cpu:0-1"})
        assert "(predicted, not tried)" in choice.why
        assert choice.plan in [each.plan for each in choice.considered]

    assert budgets == [0.0, TRY_S]


@pytest.mark.predicted_runs
def test_a_run_without_a_plan_is_planned_run_and_compared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """The summary has the interval that was predicted; a resumed run keeps the plan it was left with."""
    first = paceline.train(a_job(), run=tmp_path, devices="cpu:0-1")
    stderr_text = capfd.readouterr().err
    again = paceline.train(a_job(steps=5), run=tmp_path, resume=True)

    assert f"plan {first['plan']} on cpu:0,cpu:1, chosen: " in stderr_text
    assert first["world_size"] == 2 and again["plan"] == first["plan"] and again["steps"] == 5
    predicted = json.loads((tmp_path / "summary.json").read_text())["predicted"]
    assert predicted["step_s_low"] < predicted["step_s"] < predicted["step_s_high"]
    assert predicted["peak_memory_bytes"] > 0
