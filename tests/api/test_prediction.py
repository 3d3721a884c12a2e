"""What a run says of its own prediction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.api import known_trials, prediction
from paceline.api.prediction import _look_again, miss

MIB = 2**20


def figures(**changes: Any) -> dict[str, Any]:
    return {
        "step_s": 0.1,
        "steps": 100,
        "world_size": 2,
        "wall_s": 10.0,
        "save_blocked_s": 0.0,
        "input_s": 0.001,
        "peak_memory_bytes": 100 * MIB,
        "predicted": {
            "step_s": 0.1,
            "step_s_low": 0.09,
            "step_s_high": 0.11,
            "peak_memory_bytes": 100 * MIB,
        },
        **changes,
    }


def test_nothing_is_said_of_what_came_as_predicted():
    assert miss(figures()) == "" == miss(figures(step_s=0.0))  # of a run that was over already
    assert miss(figures(step_s=0.2, steps=5)) == ""  # mostly a run's start


@pytest.mark.parametrize("step_s", [0.05, 0.2])
def test_a_step_that_was_missed_is_said(step_s: float):
    start = f"step {1e3 * step_s:.3g} ms, predicted 90 to 110 ms; paceline report compares"
    assert miss(figures(step_s=step_s, peak_memory_bytes=200 * MIB)).startswith(start)


def test_memory_that_was_missed_is_said():
    start = "memory 200 MiB a rank, predicted 100 MiB; paceline report compares"
    assert miss(figures(peak_memory_bytes=200 * MIB)).startswith(start)
    assert miss(figures(peak_memory_bytes=112 * MIB)) == ""


def test_without_a_prediction_nothing_is_compared():
    nothing = dict.fromkeys(("step_s", "step_s_low", "step_s_high", "peak_memory_bytes"))

    assert miss(figures(predicted=nothing)) == ""


def priced(*, kind: str = "cpu", tried_job: str = "") -> Any:
    devices = [SimpleNamespace(kind=kind)]
    return SimpleNamespace(
        resolved=SimpleNamespace(cluster=SimpleNamespace(devices=devices)),
        chosen=SimpleNamespace(tried_job=tried_job),
    )


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is measured again, or forgotten."""
    looked_at: list[str] = []
    monkeypatch.setattr(
        prediction, "refresh_device", lambda kind: looked_at.append(kind) or "its rates were off"
    )
    monkeypatch.setattr(known_trials, "forget_trials", looked_at.append)
    return looked_at


def test_rates_are_measured_again_where_steps_contradict_them(looked_at: list[str]):
    assert _look_again(figures(step_s=0.2), priced()) == "this CPU: its rates were off"
    assert looked_at == ["cpu"]


def test_plans_are_tried_again_where_steps_contradict_their_trials(looked_at: list[str]):
    assert "tried again" in _look_again(figures(step_s=0.05), priced(tried_job="a job"))
    assert looked_at == ["a job"]


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"step_s": 0.13}, {}),
        ({"step_s": 0.9, "steps": 5}, {}),
        ({"step_s": 0.9}, {"kind": "cuda"}),
    ],
)
def test_nothing_is_looked_at_again_without_a_contradiction(
    looked_at: list[str], changes: dict[str, Any], more: dict[str, Any]
):
    """Half as long again, a run's start, and GPUs, whose rates are stated, are none."""
    assert _look_again(figures(**changes), priced(**more)) == "" and not looked_at
