"""What calibrations change of predictions, with figures counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.cluster.devices import Device
from paceline.planner.corrections import MEASURED, UNEXPLAINED, Calibration, Corrections
from paceline.planner.estimate import Estimate
from paceline.planner.rank_kinds import MemoryNeed
from paceline.strategies.plan import Plan

DEVICE = Device("cpu", 0, 1000)
SPREAD = 4.0  # of prices that are next to nothing known


def predicted(step_s: float = 2.0, peak_bytes: int = 100) -> Estimate:
    ledger = {"parameters": peak_bytes}
    return Estimate(
        step_s,
        peak_bytes,
        ledger,
        {"compute": step_s, "communication": 0.0},
        needs=(MemoryNeed("each rank", DEVICE, ledger),),
        low_s=step_s / math.exp(SPREAD),
        high_s=step_s * math.exp(SPREAD),
    )


def corrected(corrections: Corrections, text: str, estimate: Estimate | None = None) -> Estimate:
    return corrections.apply(Plan.parse(text), estimate or predicted())


def learnt(*calibrated: tuple[str, float, int]) -> Corrections:
    """(plan, measured step, measured bytes) of plans that were all predicted alike."""
    corrections = Corrections()
    for text, step_s, peak_bytes in calibrated:
        corrections.add(Plan.parse(text), predicted(), Calibration(step_s, peak_bytes))
    return corrections


def test_nothing_is_known_without_calibrations():
    assert corrected(Corrections(), "data=2").step_s == 2.0
    assert not Corrections().knows_kind_of(Plan.parse("data=2"))


def test_a_calibrated_plan_keeps_its_error_under_other_conditions():
    """It took 1.5 times its price; with other links, or in another precision, it is priced at half the time."""
    corrections = learnt(("data=2", 3.0, 150))
    other = corrected(corrections, "data=2", predicted(step_s=1.0))

    assert other.step_s == pytest.approx(1.5) and not other.is_measured
    assert corrected(corrections, "data=2").is_measured
    assert corrections and not Corrections()


def test_a_calibrated_plan_is_as_it_was_found():
    estimate = corrected(learnt(("data=2", 3.0, 150), ("data=4", 8.0, 90)), "data=2")

    assert (estimate.step_s, estimate.peak_memory_bytes) == (3.0, 150)
    assert (
        estimate.ledger == {"parameters": 100, MEASURED: 50}
        and sum(estimate.needs[0].ledger.values()) == 150
    )
    assert estimate.low_s < 3.0 < estimate.high_s


def test_plans_of_its_kind_are_off_by_the_same_factor_and_bytes():
    """A kind's interval is wider than a plan's own."""
    known = learnt(("data=2", 4.0, 120))
    by_kind, by_plan = (
        corrected(known, "data=2 microbatches=4", predicted(1.0)),
        corrected(known, "data=2"),
    )

    assert by_kind.step_s == pytest.approx(2.0) and by_kind.peak_memory_bytes == 120
    assert by_kind.high_s / by_kind.low_s > by_plan.high_s / by_plan.low_s


@pytest.mark.parametrize(
    ("count", "factor", "more_bytes"), [(1, 2.0, 20), (2, 4.0, 30), (4, 8.0, 40), (16, 8.0, 40)]
)
def test_between_two_of_its_kind_lies_what_lies_between(count: int, factor: float, more_bytes: int):
    """Off by 2 and 20 bytes with 1 micro-batch, by 8 and 40 with 4: a line over the logarithm, level beyond it."""
    known = learnt(("data=2", 4.0, 120), ("data=2 microbatches=4", 16.0, 140))
    estimate = corrected(known, f"data=2 microbatches={count}")

    assert (
        estimate.step_s == pytest.approx(2.0 * factor)
        and estimate.peak_memory_bytes == 100 + more_bytes
    )


@pytest.mark.parametrize(
    "other", ["data=4", "data=2 recompute=full", "data=2 compress=int8", "servers=2 workers=2"]
)
def test_other_code_and_other_counts_are_another_kind(other: str):
    assert not learnt(("data=2", 4.0, 120)).knows_kind_of(Plan.parse(other))


def test_stages_of_sharding_are_kinds_of_their_own():
    assert not learnt(("shard=2 zero=1", 4.0, 120)).knows_kind_of(Plan.parse("shard=2"))


def test_a_kind_that_nobody_tried_is_off_by_what_is_nearest():
    """Off by 2 on two ranks, by 3 alone: replicas on four ranks follow replicas, anything else the mean of both, and a
    little more those that have as many ranks."""
    known = learnt(("data=2", 4.0, 200), ("single", 6.0, 100))

    assert corrected(known, "data=4").step_s == pytest.approx(4.0)
    assert corrected(known, "pipeline=2 microbatches=4").step_s == pytest.approx(
        2 * 6**0.5, rel=0.1
    )
    assert corrected(known, "pipeline=2 microbatches=4").step_s < 2 * 6**0.5
    assert corrected(known, "pipeline=2 microbatches=4").peak_memory_bytes == 100


def test_what_a_part_takes_longer_it_takes_longer_in_all_plans():
    """Messages of two plans take three times as long, and computing as long as was said: so they do in a third plan,
    which nobody tried, and little is left to explain."""

    def prediction(compute_s: float, messages_s: float) -> Estimate:
        return replace(
            predicted(compute_s + messages_s),
            breakdown={"compute": compute_s, "communication": messages_s},
        )

    known = Corrections()
    known.add(Plan(), prediction(4.0, 0.0), Calibration(4.0, 100))
    known.add(Plan.parse("shard=2"), prediction(2.0, 2.0), Calibration(8.0, 100))
    estimate = corrected(known, "tensor=2", prediction(2.0, 1.0))

    assert estimate.step_s == pytest.approx(5.0, rel=0.08)
    assert estimate.breakdown["communication"] == pytest.approx(3.0, rel=0.15)


def test_a_bubble_is_as_wrong_as_the_computing_that_it_waits_for():
    """Computing takes half as long as predicted, and messages twice as long: a bubble lasts half as long."""

    def prediction(**breakdown: float) -> Estimate:
        return replace(predicted(sum(breakdown.values())), breakdown=breakdown)

    known = Corrections()
    known.add(Plan(), prediction(compute=4.0), Calibration(2.0, 100))
    known.add(
        Plan.parse("shard=2"), prediction(compute=2.0, communication=2.0), Calibration(5.0, 100)
    )
    estimate = corrected(
        known, "pipeline=2 microbatches=2", prediction(compute=2.0, communication=0.0, bubble=2.0)
    )

    assert estimate.step_s == pytest.approx(2.0, rel=0.25)
    assert estimate.breakdown["bubble"] == estimate.breakdown["compute"]


def test_compiled_code_that_is_slow_says_little_of_other_code():
    """It takes twice as long as predicted: other compiled plans do too, and the blocks' own code hardly."""
    known = learnt(("data=2 compile=blocks", 4.0, 100))

    assert corrected(known, "single compile=blocks").step_s == pytest.approx(4.0, rel=0.1)
    own_code = {plan: corrected(known, plan).step_s for plan in ("data=2", "single")}
    assert all(2.0 < step_s < 3.9 for step_s in own_code.values())


def test_what_no_part_explains_is_called_so():
    """A single device sends no messages, however long its step takes."""
    estimate = corrected(learnt(("single", 8.0, 100), ("data=2", 2.0, 100)), "single")

    assert (
        set(estimate.breakdown) == {"compute", "communication", UNEXPLAINED}
        and estimate.breakdown["communication"] == 0
    )
    assert (
        sum(estimate.breakdown.values()) == pytest.approx(8.0)
        and estimate.breakdown[UNEXPLAINED] > 3.0
    )


def test_a_plan_that_needs_more_than_it_was_said_to_may_not_fit():
    known = learnt(("data=2", 2.0, 1100))

    assert not corrected(known, "data=2").fits and corrected(known, "single").fits
    assert replace(predicted(), needs=()).fits
