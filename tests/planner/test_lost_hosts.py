"""What it costs a plan to go on with fewer hosts, with a spare one, or on copies of others: without training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.base.errors import UsageError
from paceline.cluster.cluster import Cluster
from paceline.launch.process.memory_store import TIME_SHARE
from paceline.planner.goodput import Goodput, outlook
from paceline.planner.problem import PlanningProblem
from paceline.planner.search import Candidate
from paceline.planner.several_hosts import LEFT_S, REPLACED_S, SILENCE_S
from paceline.planner.survival import FailureRates
from paceline.strategies.plan import Plan

WIDTH = 64


def _job(batch: int = 64) -> pl.Job:
    x = torch.zeros(batch, WIDTH)
    return pl.Job(
        model=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))),
        data=TensorDataset(x, x),
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named),
        batch=batch,
        epochs=1,
    )


@pytest.fixture(scope="module")
def problem() -> PlanningProblem:
    return PlanningProblem.of(_job())


def priced(
    problem: PlanningProblem,
    plan: str,
    cluster: str,
    *,
    step_s: float | None = None,
    **rates: float,
) -> Goodput:
    where = Cluster.parse(cluster)
    chosen = Candidate(Plan.parse(plan), problem.price(Plan.parse(plan), where))
    if step_s is not None:
        chosen = replace(chosen, estimate=replace(chosen.estimate, step_s=step_s))
    return outlook(problem, chosen, where, FailureRates(**{"mtbf_hours": 1000.0, **rates}))


def test_every_way_has_its_options(problem: PlanningProblem):
    """The smaller plan is the one under which the run goes on."""
    failure_outlook = priced(problem, "data=32", "4x8xH100")
    ways = failure_outlook.to_dict()["survival"]
    assert list(ways) == ["copies", "fewer", "spare", "resume"] and not failure_outlook.refused
    assert [ways[name].get("options") for name in ways] == [
        "--hosts 4",
        "--hosts 3:4",
        "--hosts 4",
        None,
    ]
    assert ways["fewer"]["plans"] == ["data=24"] and ways["spare"]["spares"] == 1
    for survival in failure_outlook.survivals:
        assert 0 < survival.goodput < 1
    # Four of five hosts train, and copies take 1 % of their time.
    assert ways["spare"]["goodput"] == pytest.approx(0.8 * 0.99, rel=0.01)
    text = " ".join(failure_outlook.lines())
    assert "(--hosts 3:4), under data=24 with one less" in text and "(--hosts 4, on 5)" in text
    assert ways["copies"]["restart_s"] == pytest.approx(REPLACED_S, abs=0.01)
    # Three of four hosts; without the first one the run begins again at a checkpoint.
    resumed_s = ways["resume"]["restart_s"] + ways["resume"]["interval_s"] / 2
    assert ways["fewer"]["restart_s"] == pytest.approx(
        0.75 * (SILENCE_S + LEFT_S) + 0.25 * resumed_s, abs=0.1
    )


def test_hosts_that_are_back_at_once_and_those_that_never_come(problem: PlanningProblem):
    """The first cost what copies do, but for the patience. The others are missed for their part of the time."""

    def ways(repair_hours: float) -> dict[str, float]:
        failure_outlook = priced(
            problem, "data=32", "4x8xH100", repair_hours=repair_hours, mtbf_hours=10_000.0
        )
        return {survival.name: survival.goodput for survival in failure_outlook.survivals}

    at_once, late = ways(1e-6), ways(500.0)
    assert at_once["fewer"] == pytest.approx(at_once["copies"], rel=1e-3)
    assert late["copies"] == at_once["copies"] and late["fewer"] < 0.95 * at_once["fewer"]


def test_spares_are_worth_their_time_where_others_are_slow_without_a_host(problem: PlanningProblem):
    """A step that is much longer on the hosts that are left, for long. A short repair makes going on the better way."""
    short, long = (
        priced(
            problem,
            "data=64",
            "8x8xH100",
            step_s=1e-5,
            mtbf_hours=1000.0,
            repair_hours=repair_hours,
        )
        for repair_hours in (0.1, 20.0)
    )
    for failure_outlook, name in ((short, "fewer"), (long, "spare")):
        assert (
            max(
                (way for way in failure_outlook.survivals if way.name in ("fewer", "spare")),
                key=lambda way: way.goodput,
            ).name
            == name
        )


@pytest.mark.parametrize(
    ("plan", "cluster", "refused", "why"),
    [
        ("pipeline=2 data=4 microbatches=2", "8x1xH100", {"fewer"}, "4 pieces and 7 stages"),
        ("data=16", "2x8xH100", {"fewer", "spare"}, "of two hosts"),
        ("data=12", "2x8xH100", {"copies", "fewer", "spare"}, "as many ranks on each host"),
        ("servers=1 workers=31", "4x8xH100", {"copies", "fewer", "spare"}, "no copies of servers"),
    ],
)
def test_ways_that_do_not_exist(
    problem: PlanningProblem, plan: str, cluster: str, refused: set[str], why: str
):
    """They are named with the reason, in one line."""
    failure_outlook = priced(problem, plan, cluster)
    assert (
        set(failure_outlook.refused)
        == refused
        == set(failure_outlook.to_dict()["survival_refused"])
    )
    assert (
        refused.isdisjoint(failure_outlook.to_dict()["survival"])
        and failure_outlook.survivals[-1].name == "resume"
    )
    line = list(failure_outlook.lines())[-1]
    assert line.startswith("no way here: ") and why in line and "\n" not in line


@pytest.mark.parametrize(
    "rates",
    [
        {"repair_hours": 1e300},
        {"repair_hours": 1e-300},
        {"mtbf_hours": 1e-300},
        {"mtbf_hours": 1e300},
        {"mtbf_hours": 1e-3, "repair_hours": 1e-3},
    ],
    ids=str,
)
def test_extreme_figures(problem: PlanningProblem, rates: dict[str, float]):
    """An answer, in the place of an overflow."""
    failure_outlook = priced(problem, "data=32", "4x8xH100", **rates)
    assert all(0 <= survival.goodput <= 1 for survival in failure_outlook.survivals)


def test_many_ranks_may_lack_one_host():
    """A plan for each number of hosts would take long to find."""
    large = PlanningProblem.of(_job(520))
    for cluster, least in (("64x8xH100", 62), ("65x8xH100", 64)):
        count = Cluster.parse(cluster).nodes[0].count
        ways = priced(large, f"data={8 * count}", cluster).to_dict()["survival"]
        assert ways["fewer"]["options"] == f"--hosts {least}:{count}"


def test_hosts_that_are_not_alike(problem: PlanningProblem):
    kinds = tuple(Cluster.parse(text).nodes[0] for text in ("2x8xH100", "1x8xA100"))
    chosen = Candidate(
        Plan.parse("data=24"), problem.price(Plan.parse("data=24"), Cluster.of(kinds))
    )
    failure_outlook = outlook(problem, chosen, Cluster.of(kinds), FailureRates(mtbf_hours=1000.0))
    assert (
        set(failure_outlook.refused) == {"fewer", "spare"}
        and "not alike" in failure_outlook.refused["fewer"]
    )


def test_a_smaller_plan_that_does_not_fit(
    problem: PlanningProblem, monkeypatch: pytest.MonkeyPatch
):
    price = problem.price

    def full(plan: Plan, cluster: Cluster) -> object:
        estimate = price(plan, cluster)
        needs = tuple(
            replace(need, device=replace(need.device, memory_bytes=1)) for need in estimate.needs
        )
        return estimate if plan.world_size == 32 else replace(estimate, needs=needs)

    changed = replace(problem)
    object.__setattr__(changed, "price", full)
    assert "more than a device has" in priced(changed, "data=32", "4x8xH100").refused["fewer"]


def test_copies_go_to_neighbours_where_one_host_alone_holds_a_part(problem: PlanningProblem):
    """Sending takes its share of the time, so that such runs go back further, or to a newer checkpoint."""

    def lost(plan: str, **rates: float) -> tuple[float, float]:
        way = next(
            way
            for way in priced(problem, plan, "4x8xH100", step_s=0.5, **rates).survivals
            if way.name == "spare"
        )
        return way.interval_s, way.failures.beside_s

    assert lost("data=32") == (0.5, 0.0)
    interval_s, sent_s = lost("shard=32")
    assert sent_s > 0 and interval_s == pytest.approx(max(0.5, sent_s / TIME_SHARE))


def test_gpus_of_one_host_go_on_or_the_run_is_resumed(problem: PlanningProblem):
    """A GPU that fails ends the run, and its process can't replace it: the last way says so."""
    gpus = priced(problem, "data=8", "1x8xH100")
    assert [way.name for way in gpus.survivals] == ["copies", "checkpoint", "resume"]
    assert not gpus.refused and "a GPU or the host is lost" in gpus.resumed.words
    assert "(--restarts 0, or the host is lost)" in priced(problem, "data=2", "2xcpu").resumed.words


@pytest.mark.parametrize("name", ["mtbf_hours", "repair_hours", "checkpoint_bytes_per_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_figures_that_make_no_sense(name: str, value: float):
    with pytest.raises(UsageError, match=f"{name} must be a number above 0"):
        FailureRates(**{"mtbf_hours": 1.0, name: value})
