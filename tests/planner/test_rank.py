"""Choosing among plans whose prices are made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from paceline.api.calibration import calibrate_best
from paceline.base.errors import PlanError
from paceline.cluster.devices import Device
from paceline.planner.corrections import Calibration
from paceline.planner.estimate import Estimate
from paceline.planner.rank_kinds import MemoryNeed
from paceline.planner.search import (
    Candidate,
    Change,
    best_of_each_kind,
    binding,
    flips,
    kind_of,
    reason,
    search,
    ties,
)
from paceline.strategies.limits import DeviceCounts, Limits
from paceline.strategies.plan import Plan

DEVICE = Device("cuda", 0, 100, name="H1")
EIGHT = DeviceCounts(8, 8)


def price(plan: Plan, *, message_s: float = 0.3, memory_bytes: int = 100) -> Estimate:
    """Eight seconds of computing, cut over all ranks; sharding and splitting cost messages, pipelines idle. Weights of
    160 bytes are cut by all but the data axis, activations by all axes."""
    axes = plan.axes
    if axes.tensor == 8:
        raise PlanError("a model of 4 heads can't be cut into 8 parts", hint="at most 4")
    split = axes.shard * axes.tensor * axes.pipeline
    compute_s = 8.0 / plan.world_size * (1.3 if plan.modifiers.recompute == "full" else 1.0)
    parts = {
        "compute": compute_s,
        "optimizer": 0.01,
        "communication": message_s * (axes.tensor > 1)
        + message_s / 10 * (axes.shard > 1) * plan.num_microbatches,
        "bubble": compute_s * (axes.pipeline - 1) / plan.num_microbatches,
    }
    kept = (80 if plan.modifiers.recompute == "none" else 20) / plan.num_microbatches
    ledger = {"parameters": round(160 / split), "activations": round(kept)}
    step_s = sum(parts.values())
    need = MemoryNeed("each rank", Device("cuda", 0, memory_bytes, name="H1"), ledger)
    return Estimate(
        step_s,
        sum(ledger.values()),
        ledger,
        parts,
        needs=(need,),
        low_s=step_s / 1.1,
        high_s=1.1 * step_s,
    )


def test_the_fastest_exact_plan_that_fits_is_chosen():
    """All kinds are looked at, replicas don't fit, and the answer says what binds it and why the others lose."""
    ranked_plans = search(price, Limits(64, layers=8, tensor=8), EIGHT)
    chosen = ranked_plans.chosen
    assert chosen is not None and str(chosen.plan) == "shard=8"
    assert reason(chosen, chosen) == "computing is 96 % of the step"
    kinds = {
        candidate.kind: reason(candidate, chosen)
        for candidate in best_of_each_kind(ranked_plans.ranked)
    }
    assert kinds["shard tensor"].startswith("messages that nothing hides are")
    assert kinds["pipeline"].startswith("idle pipeline ranks are")
    assert [candidate.kind for candidate in ranked_plans.too_large if candidate.kind == "data"] == [
        "data"
    ]
    (data,) = (candidate for candidate in ranked_plans.too_large if candidate.kind == "data")
    assert data.missing_bytes > 0 and "too much for a H1" in reason(data, chosen)
    assert ranked_plans.refused == {"tensor": "a model of 4 heads can't be cut into 8 parts"}
    assert ranked_plans.num_tried > 50


def test_what_binds_a_step_is_said_with_the_next_if_that_is_a_tenth():
    """By their parts of the step."""
    single = price(Plan())
    binding_texts = {
        share: binding(
            replace(single, step_s=10.0, breakdown={"optimizer": share, "compute": 10 - share})
        )
        for share in (0.9, 1.3, 6.0)
    }
    assert binding_texts == {
        0.9: "computing is 91 % of the step",
        1.3: "computing is 87 % of the step, the optimizer 13 %",
        6.0: "the optimizer is 60 % of the step, computing 40 %",
    }


def test_every_cut_of_the_model_is_refined():
    """Many ways to share one cut's state, all a little faster at first, don't keep another cut's schedules from being
    tried."""

    def idle(plan: Plan) -> Estimate:
        estimate = price(plan, memory_bytes=1000)
        is_best = plan.axes.pipeline == 2 and plan.schedule.schedule == "interleaved"
        step_s = 0.1 if is_best else 3.0 if plan.axes.pipeline == 2 else estimate.step_s
        return Estimate(
            step_s,
            estimate.peak_memory_bytes,
            estimate.ledger,
            {"compute": step_s},
            needs=estimate.needs,
        )

    ranked_plans = search(idle, Limits(64, layers=8, tensor=2), EIGHT)
    assert ranked_plans.chosen is not None and ranked_plans.chosen.plan.axes.pipeline == 2


def test_relaxed_plans_are_ranked_and_never_chosen():
    """Also where they are the fastest."""

    def cheap(plan: Plan) -> Estimate:
        estimate = price(plan, memory_bytes=1000)
        if plan.relaxed is None:
            return estimate
        return Estimate(
            0.5, estimate.peak_memory_bytes, estimate.ledger, {"compute": 0.5}, needs=estimate.needs
        )

    ranked_plans = search(cheap, Limits(64), EIGHT)
    assert ranked_plans.ranked[0].plan.relaxed is not None
    assert ranked_plans.chosen is not None and ranked_plans.chosen.plan.relaxed is None
    assert reason(ranked_plans.ranked[0], ranked_plans.chosen).endswith("% faster, and relaxed")


def test_plans_that_tie_are_said_to():
    """Within two measurements of one plan; the simplest of them is chosen."""
    ranked_plans = search(
        lambda plan: price(plan, message_s=1e-3, memory_bytes=1000), Limits(64, tensor=4), EIGHT
    )
    assert ranked_plans.chosen is not None and str(ranked_plans.chosen.plan) == "data=8"
    assert {candidate.kind for candidate in ranked_plans.tied} >= {"shard", "data shard"}
    assert reason(ranked_plans.tied[0], ranked_plans.chosen) == "as fast, for all that is known"


def test_a_tie_is_within_the_intervals_too():
    """Times that are as near as two measurements don't tie where the intervals are narrower and apart."""

    def within(step_s: float, spread: float) -> Candidate:
        return Candidate(
            Plan(), Estimate(step_s, 0, {}, {}, low_s=step_s / spread, high_s=step_s * spread)
        )

    assert ties(within(1.0, 1.2), within(1.015, 1.2)) and not ties(
        within(1.0, 1.2), within(1.03, 1.2)
    )
    assert not ties(within(1.0, 1.005), within(1.015, 1.005))
    assert ties(within(1.0, math.nan), within(1.015, math.nan))  # nobody knows


def test_a_relaxed_plan_is_chosen_where_asked():
    """If it is faster by more than a tie."""

    def cheap(plan: Plan) -> Estimate:
        estimate = price(plan, memory_bytes=1000)
        step_s = estimate.step_s if plan.relaxed is None else 0.5 if plan.outer_steps else 1.02
        return Estimate(
            step_s,
            estimate.peak_memory_bytes,
            estimate.ledger,
            {"compute": step_s},
            needs=estimate.needs,
        )

    relaxed = search(cheap, Limits(64), EIGHT, may_relax=True)
    assert relaxed.chosen is not None and relaxed.chosen.plan.outer_steps is not None
    close = search(
        lambda plan: price(plan, message_s=0.0, memory_bytes=1000),
        Limits(64),
        EIGHT,
        may_relax=True,
    )
    assert close.chosen is not None and close.chosen.plan.relaxed is None


def test_by_cost_fewer_devices_may_win():
    """Twice the devices are not twice as fast; a device that costs more is left alone."""
    shape = DeviceCounts(8, 8, may_be_fewer=True)
    fast = search(
        lambda plan: price(plan, message_s=3.0, memory_bytes=1000), Limits(64), shape
    ).chosen
    ranked_plans = search(
        lambda plan: price(plan, message_s=3.0, memory_bytes=1000),
        Limits(64),
        shape,
        rent=lambda plan: 0.01 * plan.world_size,
    )
    cheap = ranked_plans.chosen
    assert fast is not None and fast.plan.world_size == 8
    assert cheap is not None and cheap.plan.world_size == 1
    costs = [candidate.step_cost for candidate in ranked_plans.ranked]
    assert costs == sorted(costs)
    dear = next(candidate for candidate in ranked_plans.ranked if candidate.kind == "shard")
    assert "% more" in reason(dear, cheap)


def test_nothing_fits():
    """There is no choice, and the nearest plans of each kind are known."""
    ranked_plans = search(
        lambda plan: price(plan, memory_bytes=3), Limits(64, layers=8, tensor=4), EIGHT
    )
    assert ranked_plans.chosen is None and not ranked_plans.ranked and not ranked_plans.tied
    over = [candidate.missing_bytes for candidate in ranked_plans.too_large]
    assert over == sorted(over) and over[0] > 0


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda plan: price(plan, message_s=0.2), None),
        (lambda plan: price(plan, message_s=30.0, memory_bytes=1000), "data"),
    ],
)
def test_what_would_flip_the_choice(change: Callable[[Plan], Estimate], kind: str | None):
    """Only what is faster by more than a tie."""
    limits = Limits(64, layers=8, tensor=4)
    ranked_plans = search(price, limits, EIGHT)
    flipped = flips(ranked_plans, [Change("another", change)], limits, EIGHT)
    assert [(name, candidate.kind) for name, candidate in flipped] == (
        [("another", kind)] if kind else []
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("fails", [False, True])
def test_a_plan_that_was_tried_and_rejected_is_not_advised(fails: bool):
    """A change of the hardware leaves what prices are off by as it was found: plans with shards were slower, or
    failed."""
    limits = Limits(64, layers=8, tensor=4)

    def tried(plan: Plan, expected_s: float) -> Calibration:
        if plan.axes.shard > 1 and fails:
            raise PlanError("no such luck")
        return Calibration(price(plan).step_s * (3 if plan.axes.shard > 1 else 1), 100)

    before = search(price, limits, EIGHT)
    result = calibrate_best(before, tried, budget_s=60)
    after, correct = result.plans, result.corrections.apply
    assert (
        before.chosen
        and before.chosen.kind == "shard"
        and after.chosen
        and "shard" not in after.chosen.kind
    )
    flipped = flips(
        after,
        [
            Change(
                "faster links",
                lambda plan: correct(plan, price(plan, message_s=0.29)),
                has_same_memory=same,
            )
            for same in (True, False)
        ],
        limits,
        EIGHT,
    )
    assert not any("shard" in candidate.kind for _, candidate in flipped)


def test_what_a_change_leaves_alone_is_not_priced_again():
    """The answer is that of pricing every plan: other links leave memory alone, more memory leaves speed alone."""
    limits, priced = Limits(64, layers=8, tensor=4), []

    def counted(plan: Plan, **changes: float) -> Estimate:
        priced.append(plan)
        return price(plan, **changes)  # type: ignore[arg-type]

    ranked_plans = search(price, limits, EIGHT)
    for options, alike in (
        ({"message_s": 30.0}, "has_same_memory"),
        ({"memory_bytes": 1000}, "has_same_speed"),
    ):
        counts = []
        for known in ({}, {alike: True}):
            priced.clear()
            change = Change("another", partial(counted, **options), **known)  # type: ignore[arg-type]
            counts.append((flips(ranked_plans, [change], limits, EIGHT), len(set(priced))))
        assert counts[0][0] == counts[1][0] and counts[0][0]
        assert counts[1][1] < counts[0][1]


@pytest.mark.parametrize("message_s", [30.0, 0.31])
def test_what_can_not_be_better_under_a_change_is_not_priced(message_s: float):
    """With slower links a step takes at least what it takes now: plans that are slower already are left out."""
    limits, priced = Limits(64, layers=8, tensor=4), []

    def slower(plan: Plan) -> Estimate:
        priced.append(plan)
        return price(plan, message_s=message_s)

    ranked_plans, counts = search(price, limits, EIGHT), []
    for least_s in (lambda estimate: 0.0, lambda estimate: estimate.step_s):
        priced.clear()
        change = Change("slower links", slower, has_same_memory=True, least_s=least_s)
        counts.append((flips(ranked_plans, [change], limits, EIGHT), len(priced)))
    assert counts[0][0] == counts[1][0] and bool(counts[0][0]) == (message_s > 1)
    assert counts[1][1] < counts[0][1] / (1 if message_s > 1 else 3)


def test_kinds_are_without_numbers():
    assert kind_of(Plan.parse("pipeline=2 data=4 microbatches=8")) == "pipeline data"
    assert kind_of(Plan.parse("single recompute=full")) == "single"
    assert kind_of(Plan.parse("servers=2 workers=4 staleness=inf")) == "servers staleness=inf"
    assert kind_of(Plan.parse("data=2 local=10 compress=int8")) == "data local=10 compress=int8"
