"""The plans that a search looks at."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.planner.space import microbatch_counts, offered, splits, variants
from paceline.strategies import conflicts
from paceline.strategies.limits import DeviceCounts, Limits, divisors
from paceline.strategies.plan import Plan


@given(st.integers(1, 5000))
def test_divisors(count: int):
    """All of them, in order."""
    assert divisors(count) == [d for d in range(1, count + 1) if count % d == 0]


shapes = st.builds(
    lambda nodes, each: DeviceCounts(nodes * each, each), st.integers(1, 12), st.integers(1, 8)
)
limits = st.builds(
    Limits,
    batch=st.integers(1, 64),
    layers=st.integers(0, 12),
    tensor=st.sampled_from([1, 2, 4, 8]),
    parts=st.integers(1, 4),
)


@settings(deadline=None)
@given(limits, shapes)
def test_every_plan_uses_all_devices_and_is_legal(limit: Limits, shape: DeviceCounts):
    """Each way to split comes once; relaxed ones come last; servers of their own stand on no device."""
    plans = [*splits(limit, shape), *offered(limit, shape)]
    assert len({str(plan) for plan in plans}) == len(plans)
    assert sorted(plans, key=lambda plan: plan.relaxed is not None) == plans
    for plan in plans:
        conflicts.check(plan)
        assert plan.world_size == shape.num_devices and plan.replicas <= limit.batch
        assert plan.axes.tensor <= min(limit.tensor, shape.per_node)
        assert plan.axes.pipeline in (1, *range(1, limit.layers + 1))


def test_no_way_to_split_is_left_out():
    """Of 8 devices in one node, a model of 8 layers: every product of four axes, three stages of sharding."""
    axis_sizes = {
        tuple(plan.axes.sizes()[axis] for axis in ("pipeline", "data", "shard", "tensor"))
        for plan in splits(Limits(64, layers=8, tensor=8), DeviceCounts(8, 8))
    }
    sides = [1, 2, 4, 8]
    assert axis_sizes == {
        (p, d, s, t)
        for p in sides
        for d in sides
        for s in sides
        for t in sides
        if p * d * s * t == 8
    }


@given(
    st.integers(1, 300),
    st.sampled_from(["data=2", "single", "pipeline=4 data=2 microbatches=4", "shard=8"]),
)
def test_micro_batches_go_down_to_one_sample(batch: int, text: str):
    """They double; the last has a sample each, and a pipeline begins with one for each rank."""
    plan = Plan.parse(text)
    samples = math.ceil(batch / plan.replicas)
    counts = microbatch_counts(plan, Limits(batch))
    assert counts[0] == min(plan.axes.pipeline, samples) and counts[-1] == samples
    assert all(a < b <= 2 * a for a, b in pairwise(counts))


def test_schedules_of_a_pipeline():
    """Each that can run; interleaved ones only in whole rounds and with as many layers as stages."""
    plans = [
        str(plan)
        for plan in variants(Plan.parse("pipeline=4 microbatches=8"), Limits(64, layers=12))
    ]
    assert plans == [
        "pipeline=4 schedule=gpipe microbatches=8",
        "pipeline=4 schedule=interleaved microbatches=8 virtual=2",
        "pipeline=4 schedule=interleaved microbatches=8 virtual=3",
        "pipeline=4 schedule=zero-bubble microbatches=8",
    ]
    assert not list(variants(Plan.parse("data=2"), Limits(64, layers=12)))
    odd = [
        plan.schedule.schedule
        for plan in variants(Plan.parse("pipeline=4 microbatches=6"), Limits(64, layers=12))
    ]
    assert odd == ["gpipe", "zero-bubble"]
