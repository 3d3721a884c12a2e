"""The plans that a job and a number of devices allow, in families. The plans of a family split the
work in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from paceline.base.errors import PlanError
from paceline.strategies import conflicts
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.limits import DeviceCounts, Limits, divisors
from paceline.strategies.plan import Axes, Plan
from paceline.strategies.registry import strategies

MOST_PARTS = 8


def splits(limits: Limits, shape: DeviceCounts) -> Iterator[Plan]:
    """Yield exact plans by all-reduce and sharding, one for each way to split; nothing else is
    decided.

    The tensor axis stays in a node, because ranks wait for its exchanges.
    """
    for count in shape.counts:
        yield from _splits(limits, count, shape.per_node)


def _splits(limits: Limits, count: int, per_node: int) -> Iterator[Plan]:
    for pipeline in (p for p in divisors(count) if p == 1 or p <= limits.layers):
        for tensor in (t for t in divisors(count // pipeline) if t <= min(limits.tensor, per_node)):
            replicas = count // pipeline // tensor
            if replicas > limits.batch:
                continue
            for shard in divisors(replicas):
                for zero in (1, 2, 3) if shard > 1 else (3,):
                    yield _plan(
                        pipeline=pipeline,
                        tensor=tensor,
                        data=replicas // shard,
                        shard=shard,
                        zero=zero if shard > 1 else None,
                    )
    if 1 < count <= min(limits.parts, MOST_PARTS):
        yield _plan(place=count)


def offered(limits: Limits, shape: DeviceCounts) -> list[Plan]:
    """Return the other plans on all devices, as each strategy defines them.

    Exact plans come first, then relaxed ones; of each kind, from the least to the greatest
    difference.
    """
    if not 1 < shape.num_devices <= limits.batch:
        return []
    plans = [plan for strategy in strategies() for plan in strategy.plans(limits, shape)]
    return sorted(plans, key=lambda plan: plan.relaxed is not None)


def microbatch_counts(plan: Plan, limits: Limits) -> list[int]:
    """Return the possible numbers of micro-batches of a step, from the fewest.

    The first number puts as many samples as possible into each micro-batch, the next half as many,
    and so on down to one. A pipeline has at least one micro-batch for each rank, if there are
    enough samples.
    """
    samples = -(-limits.batch // plan.replicas)
    least = min(plan.num_stage_ranks, samples)
    counts = [least]
    while counts[-1] < samples:
        counts.append(min(samples, 2 * counts[-1]))
    return counts


def variants(plan: Plan, limits: Limits) -> Iterator[Plan]:
    """Yield a plan in its other forms, such as schedules, with the same split."""
    for strategy in ActivePlan(plan).strategies:
        for other in strategy.variants(plan, limits):
            if other != plan and _composes(other):
                yield other


def compiled_variant(plan: Plan) -> Plan | None:
    """Return the plan with compiled blocks; None if that doesn't compose."""
    compiled = plan.with_(compile="blocks")
    return compiled if _composes(compiled) else None


def _composes(plan: Plan) -> bool:
    try:
        conflicts.check(plan)
    except PlanError:
        return False
    return True


@lru_cache(maxsize=4096)  # asked for each part of each plan after each trial
def uncompiled_variant(plan: Plan) -> Plan:
    """Return the plan that runs the blocks' own code."""
    return plan.with_(compile="none")


def _plan(**values: object) -> Plan:
    """Make a plan, and leave out axes of size one and values that are None."""
    return Plan.of(
        **{
            key: value
            for key, value in values.items()
            if value is not None and (key, value) not in _ALONE
        }
    )


_ALONE = [(axis, 1) for axis in Axes().sizes()]
