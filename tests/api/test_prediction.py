"""What a run says of its own prediction."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.api.prediction import miss

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
    assert (
        miss(figures(), load=2.0) == "" == miss(figures(step_s=0.0), load=2.0)
    )  # of a run that was over already


@pytest.mark.parametrize(
    ("changes", "load", "cause"),
    [
        ({"step_s": 0.2, "steps": 5}, 2.0, "5 steps are mostly a run's start"),
        (
            {"step_s": 0.2, "input_s": 0.08},
            2.0,
            "reading data takes 80 ms of it, which --loader-workers may hide",
        ),
        ({"step_s": 0.2}, 5.0, r"other processes used the cores \(a load of 5.0 with 2 ranks\)"),
        ({"step_s": 0.2, "save_blocked_s": 6.0}, 2.0, "checkpoints were written meanwhile"),
        ({"step_s": 0.2}, 2.0, "its operators are slower here than their rates say"),
        ({"step_s": 0.05}, 2.0, "the machine was busier, or colder, when its rates were taken"),
    ],
)
def test_a_miss_has_one_likely_cause(changes: dict[str, Any], load: float, cause: str):
    message = miss(figures(**changes), load=load)

    assert message.startswith(
        f"a step took {1e3 * changes['step_s']:.3g} ms and 90 to 110 ms were predicted: "
    )
    assert "\n" not in message
    assert re.search(cause, message)


def test_memory_that_was_missed_is_said():
    assert miss(figures(peak_memory_bytes=200 * MIB), load=2.0).startswith(
        "a rank needed 200 MiB and 100 MiB were predicted"
    )
    assert miss(figures(peak_memory_bytes=112 * MIB), load=2.0) == ""


def test_without_a_prediction_nothing_is_compared():
    nothing = dict.fromkeys(("step_s", "step_s_low", "step_s_high", "peak_memory_bytes"))

    assert miss(figures(predicted=nothing), load=2.0) == ""
