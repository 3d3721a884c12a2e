"""Which plans are tried, in which order, and what becomes of the ranking; then a real calibration on two ranks."""

from __future__ import annotations

import math
import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.api.calibration import calibrate, calibrate_best
from paceline.base.errors import PacelineError
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.launch.process.failure import RankFailed, stopped
from paceline.launch.process.heartbeats import Heartbeat
from paceline.planner.corrections import SPREAD, Calibration
from paceline.planner.estimate import Estimate
from paceline.planner.rank_kinds import MemoryNeed
from paceline.planner.search import Candidate, RankedPlans
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
    after = calibrate_best(ranked_plans(data_2=1.0, shard_2=1.2, single=1.4), machine, budget_s=60)

    assert machine.tried[:2] == ["data=2", "shard=2"] and set(machine.tried) == {
        "data=2",
        "shard=2",
        "single",
    }
    assert [(str(candidate.plan), candidate.estimate.step_s) for candidate in after.ranked] == [
        ("shard=2", 1.5),
        ("single", 3.0),
        ("data=2", 4.0),
    ]


def test_one_plan_of_a_kind_stands_for_the_others():
    machine = Machine(data_2=1.0)
    calibrate_best(
        ranked_plans(data_2=1.0, data_2__accumulate_2=1.1, data_2__accumulate_3=1.2),
        machine,
        budget_s=60,
    )

    assert set(machine.tried) == {"data=2"}


def test_a_kind_is_tried_again_with_many_more_micro_batches():
    machine = Machine(data_2=1.0, single=2.0, data_2__accumulate_4=1.3)
    calibrate_best(
        ranked_plans(data_2=1.0, data_2__accumulate_2=1.1, data_2__accumulate_4=1.2, single=1.3),
        machine,
        budget_s=60,
    )

    assert list(dict.fromkeys(machine.tried)) == ["data=2", "single", "data=2 accumulate=4"]


def test_a_surprise_is_tried_again_and_the_faster_counts():
    """Something else used the machine while the first plan was tried."""
    took_s = [7.0, 1.5]

    def run(plan: Plan, expected_s: float) -> Calibration:
        return Calibration(took_s.pop(0) if took_s else 1.5, 100)

    after = calibrate_best(ranked_plans(data_2=1.0), run, budget_s=60)

    assert after.ranked[0].estimate.step_s == 1.5 and not took_s


def test_rivals_are_tried_again_before_what_looks_slower_is_tried():
    """Replicas look faster in the first trial and are not in the median of three; `single` is far off."""
    took_s = {"data=2": [1.0, 1.2, 1.1], "shard=2": [1.05, 1.04, 1.06], "single": [3.0, 3.0, 3.0]}
    tried = []

    def run(plan: Plan, expected_s: float) -> Calibration:
        tried.append(str(plan))
        return Calibration(took_s[str(plan)].pop(0), 100 + len(tried))

    after = calibrate_best(ranked_plans(data_2=1.0, shard_2=1.05, single=3.0), run, budget_s=60)

    assert tried == [
        "data=2",
        "shard=2",
        "data=2",
        "shard=2",
        "shard=2",
        "data=2",
        "single",
        "single",
        "single",
    ]
    assert [
        (str(candidate.plan), candidate.estimate.step_s, candidate.estimate.peak_memory_bytes)
        for candidate in after.ranked
    ] == [("shard=2", 1.05, 105), ("data=2", 1.1, 106), ("single", 3.0, 109)]


def test_trials_that_differ_widen_all_intervals():
    """Those of alike trials stay as they were fitted."""

    def width(*took_s: float) -> list[float]:
        left = {"data=2": list(took_s), "single": [3.0, 3.0, 3.0]}
        after = calibrate_best(
            ranked_plans(data_2=1.0, data_2__accumulate_2=1.1, single=3.0),
            lambda plan, expected_s: Calibration(left[str(plan)].pop(0), 100),
            budget_s=60,
        )
        return [candidate.estimate.high_s / candidate.estimate.low_s for candidate in after.ranked]

    alike, uneven = width(1.0, 1.0, 1.0), width(1.0, 1.3, 0.8)
    assert alike == pytest.approx(
        [math.exp(2 * SPREAD[nearness]) for nearness in ("itself", "kind", "itself")]
    )
    assert all(wide > 1.2 * narrow for narrow, wide in zip(alike, uneven, strict=True))


def test_what_looks_much_slower_is_not_tried():
    machine = Machine(data_2=1.0)
    calibrate_best(ranked_plans(data_2=1.0, single=1.9), machine, budget_s=60, worth=1.5)

    assert set(machine.tried) == {"data=2"}


def test_relaxed_plans_are_tried_where_no_exact_one_fits():
    machine = Machine(data_2__local_8=1.0)
    calibrate_best(ranked_plans(data_2__local_8=2.0), machine, budget_s=60)

    assert set(machine.tried) == {"data=2 local=8"}


def test_nothing_is_tried_without_time():
    machine = Machine()

    assert (
        calibrate_best(ranked_plans(data_2=1.0), machine, budget_s=0).ranked[0].estimate.step_s
        == 1.0
    )
    assert not machine.tried


def test_a_plan_that_fails_is_refused_with_its_reason():
    after = calibrate_best(ranked_plans(data_2=1.0, single=2.0), Machine(single=2.5), budget_s=60)

    assert [str(candidate.plan) for candidate in after.ranked] == ["single"]
    assert after.refused == {"data=2": "it failed when it was tried: it broke"}


def test_a_request_to_stop_is_not_a_plan_that_failed():
    def run(plan: Plan, expected_s: float) -> Calibration:
        raise RankFailed(stopped(0, signal.SIGTERM, Heartbeat(1, "forward", 0.0)))

    with pytest.raises(RankFailed, match="SIGTERM"):
        calibrate_best(ranked_plans(data_2=1.0, single=2.0), run, budget_s=60)


@pytest.mark.parametrize("plan", ["data=2", "tensor=2", "server=1 workers=2 colocate=yes"])
def test_ranks_take_a_few_steps(capfd: pytest.CaptureFixture[str], plan: str):
    """A plan is run as train runs it: a step takes time, a rank needs memory, and nobody hears of it, nor of what its
    layers are split into."""
    x = torch.randn(64, 16)
    job = paceline.Job(
        model=lambda: nn.Linear(16, 4),
        data=TensorDataset(x, x.argmax(1) % 4),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        batch=8,
        steps=1000,
        validation=TensorDataset(x, x.argmax(1) % 4),
    )
    tried = calibrate(job, Cluster.local("cpu:0-1"), Plan.parse(plan), 0.05)

    assert tried.step_s > 0 and tried.peak_memory_bytes > 0
    assert capfd.readouterr() == ("", "")
