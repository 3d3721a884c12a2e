"""Which plans are tried, in which order, and what becomes of the ranking; then a real calibration on two ranks."""

from __future__ import annotations

import gc
import math
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.api import calibration, known_trials
from paceline.api.calibration import (
    FEWEST_STEPS,
    calibrate,
    calibrate_best,
    try_best,
)
from paceline.api.known_trials import KnownTrials
from paceline.base.errors import PacelineError
from paceline.base.imports import without_collector
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.launch.process.failure import RankFailed, stopped
from paceline.launch.process.heartbeats import Heartbeat
from paceline.planner.corrections import SPREAD, Calibration
from paceline.planner.estimate import Estimate
from paceline.planner.problem import PlanningProblem
from paceline.planner.rank_kinds import MemoryNeed
from paceline.planner.search import Candidate, RankedPlans, reason
from paceline.strategies.plan import Plan

DEVICE = Device("cpu", 0, 1000)


def ranked_plans(**predicted_s: float) -> RankedPlans:
    """Plans by their text, with `_` for `=`."""

    def priced(text: str, step_s: float) -> Candidate:
        ledger = {"parameters": 100}
        return Candidate(
            Plan.parse(text.replace("__", " ").replace("_", "=")),
            Estimate(
                step_s,
                100,
                ledger,
                {"compute": step_s},
                needs=(MemoryNeed("each rank", DEVICE, ledger),),
                low_s=step_s / 5,
                high_s=5 * step_s,
            ),
        )

    return RankedPlans(
        [
            priced(text, step_s)
            for text, step_s in sorted(predicted_s.items(), key=lambda item: item[1])
        ]
    )


class Machine:
    """Measures what it is told to and remembers what it was asked for."""

    def __init__(self, **took_s: float) -> None:
        self.took_s = {
            text.replace("__", " ").replace("_", "="): step_s for text, step_s in took_s.items()
        }
        self.tried: list[str] = []

    def __call__(self, plan: Plan, expected_s: float) -> Calibration:
        self.tried.append(str(plan))
        if str(plan) not in self.took_s:
            raise PacelineError("it broke", hint="mend it")
        return Calibration(self.took_s[str(plan)], 100)


def test_the_best_is_tried_until_it_is_the_best():
    """Replicas are said to be fastest and are not: shards, which then look best, are tried and win."""
    machine = Machine(data_2=4.0, shard_2=1.5, single=3.0)
    after = calibrate_best(
        ranked_plans(data_2=1.0, shard_2=1.2, single=1.4), machine, budget_s=60
    ).plans

    assert machine.tried[:2] == ["data=2", "shard=2"]
    first, *_ = after.ranked
    assert (str(first.plan), first.estimate.step_s) == ("shard=2", 1.5)
    taken = {str(each.plan): each.estimate.step_s for each in after.ranked}
    assert taken["data=2"] == 4.0 and taken["single"] > 1.5


def test_one_plan_of_a_kind_stands_for_the_others():
    machine = Machine(data_2=1.0)
    calibrate_best(
        ranked_plans(data_2=1.0, data_2__accumulate_2=1.1, data_2__accumulate_3=1.2),
        machine,
        budget_s=60,
    )

    assert set(machine.tried) == {"data=2"}


def test_a_surprise_is_tried_again_and_the_faster_counts():
    """Something else used the machine while the first plan was tried."""
    took_s = [7.0, 1.5]

    def run(plan: Plan, expected_s: float) -> Calibration:
        return Calibration(took_s.pop(0) if took_s else 1.5, 100)

    after = calibrate_best(ranked_plans(data_2=1.0), run, budget_s=60).plans

    assert after.ranked[0].estimate.step_s == 1.5 and not took_s


def test_rivals_are_tried_again_and_what_looks_slower_is_not_tried():
    """Replicas look faster in the first trial and are not in the median of three; `single` is far off."""
    took_s = {"data=2": [1.0, 1.2, 1.1], "shard=2": [1.05, 1.04, 1.06]}
    tried = []

    def run(plan: Plan, expected_s: float) -> Calibration:
        tried.append(str(plan))
        return Calibration(took_s[str(plan)].pop(0), 100 + len(tried))

    after = calibrate_best(
        ranked_plans(data_2=1.0, shard_2=1.05, single=3.0), run, budget_s=60
    ).plans

    assert tried == [
        "data=2",
        "shard=2",
        "data=2",
        "shard=2",
        "shard=2",
        "data=2",
    ]
    assert [
        (str(candidate.plan), candidate.estimate.step_s, candidate.estimate.peak_memory_bytes)
        for candidate in after.ranked
    ][:2] == [("shard=2", 1.05, 105), ("data=2", 1.1, 106)]
    assert str(after.ranked[2].plan) == "single" and not after.ranked[2].estimate.is_measured


def test_trials_that_differ_widen_all_intervals():
    """Those of alike trials stay as they were fitted."""

    def width(*took_s: float) -> list[float]:
        left = list(took_s)
        after = calibrate_best(
            ranked_plans(data_2=1.0, data_2__accumulate_2=1.1),
            lambda plan, expected_s: Calibration(left.pop(0), 100),
            budget_s=60,
        ).plans
        return [candidate.estimate.high_s / candidate.estimate.low_s for candidate in after.ranked]

    alike, uneven = width(1.0, 1.0, 1.0), width(1.0, 1.3, 0.8)
    assert alike == pytest.approx(
        [math.exp(2 * SPREAD[nearness]) for nearness in ("itself", "kind")]
    )
    assert all(wide > 1.2 * narrow for narrow, wide in zip(alike, uneven, strict=True))


def test_a_plan_whose_steps_are_too_long_is_not_tried():
    """A few steps of `single` take longer than there is time."""
    machine = Machine(data_2=1.0)
    plans = ranked_plans(data_2=1.0, single=FEWEST_STEPS)
    calibrate_best(plans, machine, budget_s=FEWEST_STEPS + 1.0)

    assert set(machine.tried) == {"data=2"}


@pytest.mark.parametrize("late_s", [0.0, 60.0])
def test_a_plan_that_starts_late_is_tried_in_time_of_its_own_or_left_out(late_s: float):
    """What its compiled code gains is less than prices know."""
    plans = ranked_plans(data_2=1.0)
    fast = replace(plans.ranked[0].estimate, step_s=0.8, start_s=20.0)
    late = Candidate(Plan.parse("data=2 compile=blocks"), fast)
    plans = replace(plans, ranked=[late, *plans.ranked])
    machine = Machine(data_2=1.0, data_2__compile_blocks=0.8)
    after = calibrate_best(plans, machine, budget_s=10.0, late_s=late_s).plans

    assert (str(late.plan) in machine.tried) == (late in plans.ranked and late_s > 0)
    assert (late.plan in [each.plan for each in after.ranked]) == (late_s > 0)


def test_a_plan_that_was_tried_is_chosen():
    """There was no time to try what looks faster."""
    known = KnownTrials(trials=[(Plan.parse("data=2"), Calibration(4.0, 100))] * 3)
    plans = calibrate_best(
        ranked_plans(data_2=1.0, single=0.9), Machine(), budget_s=0.0, known=known
    ).plans

    assert str(plans.ranked[0].plan) == "single" and plans.chosen
    assert str(plans.chosen.plan) == "data=2"
    assert "no time to try it" in reason(plans.ranked[0], plans.chosen)


def test_what_was_tried_before_counts():
    known = KnownTrials("a job", [(Plan.parse("data=2"), Calibration(4.0, 100))] * 3)
    plans = ranked_plans(data_2=1.0, single=1.4)
    after = calibrate_best(plans, Machine(), budget_s=0.0, known=known).plans

    assert [str(each.plan) for each in after.ranked] == ["data=2", "single"]
    assert after.ranked[0].estimate.step_s == 4.0 and after.ranked[0].estimate.is_measured
    machine = Machine(single=3.0)
    calibrate_best(plans, machine, budget_s=60, known=known)
    assert set(machine.tried) == {"single"}


@pytest.mark.parametrize("may_relax", [False, True])
def test_relaxed_plans_are_tried_where_they_may_be_chosen(may_relax: bool):
    machine = Machine(data_2__local_8=1.0)
    plans = replace(ranked_plans(data_2__local_8=2.0), may_relax=may_relax)
    calibrate_best(plans, machine, budget_s=60)

    assert set(machine.tried) == ({"data=2 local=8"} if may_relax else set())


def test_nothing_is_tried_without_time():
    machine = Machine()

    assert (
        calibrate_best(ranked_plans(data_2=1.0), machine, budget_s=0)
        .plans.ranked[0]
        .estimate.step_s
        == 1.0
    )
    assert not machine.tried


def test_a_plan_that_fails_is_refused_with_its_reason():
    after = calibrate_best(
        ranked_plans(data_2=1.0, single=2.0), Machine(single=2.5), budget_s=60
    ).plans

    assert [str(candidate.plan) for candidate in after.ranked] == ["single"]
    assert after.refused == {"data=2": "it failed when it was tried: it broke"}


def test_a_request_to_stop_is_not_a_plan_that_failed():
    def run(plan: Plan, expected_s: float) -> Calibration:
        raise RankFailed(stopped(0, signal.SIGTERM, Heartbeat(1, "forward", 0.0)))

    with pytest.raises(RankFailed, match="SIGTERM"):
        calibrate_best(ranked_plans(data_2=1.0, single=2.0), run, budget_s=60)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", ["data=2", "tensor=2", "servers=1 workers=2 colocate=yes"])
def test_ranks_take_a_few_steps(capfd: pytest.CaptureFixture[str], plan: str):
    """A plan is run as train runs it: a step takes time, a rank needs memory, and nobody hears of it, nor of what its
    layers are split into."""

    def model() -> nn.Module:
        assert gc.isenabled()
        return nn.Linear(16, 4)

    x = torch.randn(64, 16)
    job = paceline.Job(
        model=model,
        data=TensorDataset(x, x.argmax(1) % 4),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=8,
        steps=1000,
        validation=TensorDataset(x, x.argmax(1) % 4),
    )
    with without_collector():  # as `plan` calls it
        tried = calibrate(job, Cluster.local("cpu:0-1"), Plan.parse(plan), 0.05)

    assert tried.step_s > 0 and tried.peak_memory_bytes > 0
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The plans that are tried, with a cache of their own: `data=2` takes 2 s a step, others 3."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(known_trials, "OLD_S", 3600.0)
    tried: list[str] = []

    def calibrate(job: object, cluster: Cluster, plan: Plan, expected_s: float) -> Calibration:
        tried.append(str(plan))
        return Calibration(2.0 if str(plan) == "data=2" else 3.0, 100)

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    return tried


class Problem:
    """As much of a planning problem as trials look at."""

    def __new__(cls, step_s: float = 1.0) -> Any:
        plans = ranked_plans(data_2=step_s, single=1.1 * step_s)
        job = SimpleNamespace(batch=8, precision="float32")
        problem = PlanningProblem(job, profile=f"{step_s}", pieces=None)  # type: ignore[arg-type]
        object.__setattr__(problem, "search", lambda cluster, may_relax: plans)
        return problem, plans


def test_trials_are_kept_for_the_next_time(tried: list[str]):
    """And hold for the same job alone. Prices of the problem are corrected from then on."""
    cluster = Cluster.local("cpu:0-1")
    problem, plans = Problem()
    corrected, first = try_best(problem, plans, cluster, budget_s=60.0)
    count = len(tried)
    assert set(tried) == {"data=2", "single"} and first.chosen and first.chosen.estimate.step_s == 2
    assert corrected.corrections and not problem.corrections

    again, second = try_best(problem, plans, cluster, budget_s=60.0)
    assert len(tried) == count and second.ranked == first.ranked and again.corrections
    _, untried = try_best(problem, plans, cluster, budget_s=0.0)
    assert untried.ranked == first.ranked
    try_best(problem, plans, Cluster.local("cpu:0-2"), budget_s=60.0)
    other, plans = Problem(1.2)
    try_best(other, plans, cluster, budget_s=60.0)
    assert len(tried) == 3 * count

    known_trials.forget_trials(known_trials.fingerprint(problem, cluster))
    assert not KnownTrials.read(problem, cluster).trials
    known = KnownTrials.read(other, cluster)
    known.trials.append((Plan.parse("single compile=blocks"), Calibration(1.0, 1, 20.0)))
    known.write()
    assert KnownTrials.read(other, cluster).trials == known.trials


def test_time_that_was_spent_counts(tried: list[str]):
    cluster, (problem, plans) = Cluster.local("cpu:0-1"), Problem()
    known = KnownTrials.read(problem, cluster)
    known.spent_s = 60.0
    known.write()
    try_best(problem, plans, cluster, budget_s=60.0)
    assert not tried
    try_best(problem, plans, cluster, budget_s=120.0)
    assert tried


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}'])
def test_damaged_trials_are_none(tried: list[str], tmp_path: Path, content: str):
    cluster, (problem, plans) = Cluster.local("cpu:0-1"), Problem()
    try_best(problem, plans, cluster, budget_s=60.0)
    (path,) = (tmp_path / "paceline").iterdir()
    path.write_text(content)
    assert not KnownTrials.read(problem, cluster).trials


def test_old_trials_are_none(tried: list[str], monkeypatch: pytest.MonkeyPatch):
    cluster, (problem, plans) = Cluster.local("cpu:0-1"), Problem()
    try_best(problem, plans, cluster, budget_s=60.0)
    monkeypatch.setattr(known_trials, "OLD_S", 0.0)
    assert not KnownTrials.read(problem, cluster).trials


def test_rates_that_a_first_step_contradicts_are_looked_at_again(
    tried: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """All plans are priced again if the rates have changed, and a line says so."""
    changes = ["its rates were off"]
    monkeypatch.setattr(
        calibration, "refresh_device", lambda kind: changes.pop() if changes else ""
    )
    cluster, (problem, plans) = Cluster.local("cpu:0-1"), Problem(0.5)
    dearer = ranked_plans(data_2=1.9, single=2.9)
    object.__setattr__(problem, "search", lambda cluster, may_relax: dearer)
    corrected, _ = try_best(problem, plans, cluster, budget_s=60.0)

    assert capsys.readouterr().err == (
        "note: a step of 'data=2' took 4 times as long as this CPU's rates say: its rates were off\n"
    )
    assert not changes
    plan = Plan.parse("data=2")
    assert corrected.corrections.apply(plan, dearer.ranked[0].estimate).is_measured


def test_rates_that_fit_are_left_alone(tried: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "refresh_device", None)
    problem, plans = Problem(1.9)
    try_best(problem, plans, Cluster.local("cpu:0-1"), budget_s=60.0)
    assert tried
