"""Two runs side by side: a slowdown is found, chance alone is not taken for one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.errors import UsageError
from paceline.reports.comparison import Condition, compare
from paceline.reports.record import RunRecord


def run(seed: int, *, step_s: float = 0.01, num_steps: int = 200, ended: bool = True) -> RunRecord:
    """A run whose steps differ by chance, and are slow together for a while now and then."""
    draw, times, slow = random.Random(seed), [], 1.0
    for step in range(num_steps):
        if step % 25 == 0:
            slow = draw.uniform(0.95, 1.05)
        times.append(step_s * slow * draw.lognormvariate(0.0, 0.1))
    steps = tuple(
        {"step": step + 1, "step_s": time, "loss": 1.0} for step, time in enumerate(times)
    )
    summary = {
        "step_s": sum(times) / num_steps,
        "samples_per_s": 8 * num_steps / sum(times),
        "final_loss": 0.5,
        "peak_memory_bytes": 1000,
        "metrics": {"accuracy": 0.5},
    }
    return RunRecord(Path(f"run-{seed}"), {"plan": "single"}, summary if ended else {}, steps=steps)


def test_a_planted_slowdown_fails():
    """In 20 of 20 pairs a step that takes 1.2 times as long is more than 5 % worse."""
    limit = [Condition.parse("step_s>5%")]
    assert all(
        compare(run(seed), run(100 + seed, step_s=0.012), limit).failed for seed in range(20)
    )


def test_equal_runs_pass():
    limit = [Condition.parse("step_s>5%"), Condition.parse("final_loss > 0%")]
    assert not any(compare(run(seed), run(100 + seed), limit).failed for seed in range(100))


@pytest.mark.parametrize("busy", [0, 1])
def test_other_work_on_the_machine_is_no_slowdown(busy: int):
    """It makes most of either run's steps two to five times as long, and the mean with them; two parts stay quiet."""
    runs = [run(1), run(2)]
    disturbed = runs[busy].steps
    for number, row in enumerate(disturbed):
        if not 60 <= number < 110:
            row["step_s"] *= 2 + number % 4  # type: ignore[index]
    mean_s = sum(row["step_s"] for row in disturbed) / len(disturbed)
    runs[busy].summary.update(step_s=mean_s, samples_per_s=8 / mean_s)  # type: ignore[attr-defined]
    assert not compare(*runs, [Condition("step_s", 0.05), Condition("samples_per_s", 0.05)]).failed


def test_work_beside_the_whole_of_a_run_is_no_slowdown():
    """All its steps take twice as long, and its ranks had no core for half of the time; it is one without waiting."""
    starved = run(2, step_s=0.02)
    starved.summary.update(wall_s=4.0, core_wait_s=2.1)  # type: ignore[attr-defined]
    limit = [Condition("step_s", 0.05)]
    assert not compare(run(1), starved, limit).failed
    starved.summary.update(core_wait_s=0.1)  # type: ignore[attr-defined]
    assert compare(run(1), starved, limit).failed


def test_a_figure_that_is_no_time_has_no_chance():
    """Memory is compared as it stands."""
    larger = run(1)
    larger.summary["peak_memory_bytes"] = 1030  # type: ignore[index]
    assert [
        str(each) for each in compare(run(0), larger, [Condition("peak_memory_bytes", 0.02)]).failed
    ] == ["peak_memory_bytes>2%"]


def test_what_a_slowdown_is_of_is_said():
    """The figures beside it are means of whole runs."""
    lines = compare(run(1), run(2, step_s=0.03)).describe().splitlines()
    assert "% worse where each run was quietest" in next(
        line for line in lines if line.startswith("step_s")
    )


def test_runs_too_short_to_tell_do_not_fail():
    few = [Condition.parse("step_s>5%")]
    assert not compare(run(0, num_steps=12), run(1, num_steps=12, step_s=0.1), few).failed


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UsageError, match="did not end"):
        compare(run(0), run(1, ended=False))
    with pytest.raises(UsageError, match="accuracy"):  # nobody says whether more is better
        compare(run(0), run(1), [Condition("accuracy", 0.01)])
    with pytest.raises(UsageError, match="nothing_like_it"):
        compare(run(0), run(1), [Condition("nothing_like_it", 0.01)])


@given(st.text(max_size=20))
def test_a_condition_is_read_or_refused(text: str):
    try:
        condition = Condition.parse(text)
    except UsageError:
        return
    assert Condition.parse(str(condition)) == condition


def test_what_one_run_alone_has_is_shown_and_is_no_condition():
    first, second = run(1), run(2)
    other = replace(
        second, summary={**second.summary, "validation_loss": 0.5, "metrics": {"f1": 0.9}}
    )
    rows = {
        line.split()[0]: line.split()[1:] for line in compare(first, other).describe().splitlines()
    }
    assert (
        rows["validation_loss"] == ["-", "0.5"]
        and rows["accuracy"] == ["0.5", "-"]
        and rows["f1"] == ["-", "0.9"]
    )
    with pytest.raises(UsageError, match="that can be worse"):
        compare(first, other, [Condition.parse("validation_loss>1%")])


@pytest.mark.parametrize("changes", [{"step_s": None}, {"step_s": 0.0}, {"samples_per_s": 0.0}])
def test_speeds_that_a_run_does_not_say_fail_nothing(changes: dict[str, Any]):
    first, second = run(1), run(2)
    damaged = replace(second, summary={**second.summary, **changes})
    for runs in ((first, damaged), (damaged, first)):
        assert not compare(*runs, [Condition.parse("samples_per_s>5%")]).failed
