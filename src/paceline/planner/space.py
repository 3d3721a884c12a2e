"""The plans that a job and a number of devices allow, in families: the plans of a family split the work alike."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.base.errors import PlanError
from paceline.strategies import conflicts
from paceline.strategies.limits import DeviceCounts, Limits, divisors
from paceline.strategies.plan import Axes, Plan
from paceline.strategies.registry import active, strategies

MOST_PARTS = 8


def splits(limits: Limits, shape: DeviceCounts) -> Iterator[Plan]:
    """Exact plans by all-reduce and sharding, one a way to split; nothing else is decided.

    The tensor axis stays in a node: its exchanges are waited for.
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
        yield _plan(place="auto", parts=count)


def served(limits: Limits, shape: DeviceCounts) -> Iterator[Plan]:
    """Other exact plans on all devices, as each strategy has them."""
    if 1 < shape.num_devices <= limits.batch:
        for strategy in strategies():
            yield from strategy.plans(limits, shape)


def relaxed(limits: Limits, shape: DeviceCounts) -> Iterator[Plan]:
    """Plans that give something up against one device, from the least to the most of each kind."""
    if 1 < shape.num_devices <= limits.batch:
        for strategy in strategies():
            yield from strategy.relaxed_plans(limits, shape)


def microbatch_counts(plan: Plan, limits: Limits) -> list[int]:
    """Micro-batches of a step, from the fewest: as many samples as can be at first, half as many, down to one.

    A pipeline has one for each rank at least, where there are as many samples.
    """
    samples = -(-limits.batch // plan.replicas)
    least = min(plan.num_stage_ranks, samples)
    counts = [least]
    while counts[-1] < samples:
        counts.append(min(samples, 2 * counts[-1]))
    return counts


def variants(plan: Plan, limits: Limits) -> Iterator[Plan]:
    """A plan in its other forms, such as schedules, for what is split alike."""
    for strategy in active(plan):
        for other in strategy.variants(plan, limits):
            if other != plan and _composes(other):
                yield other


def compiled_variant(plan: Plan) -> Plan | None:
    """The plan with compiled blocks; None if that doesn't compose."""
    compiled = plan.with_(compile="blocks")
    return compiled if _composes(compiled) else None


def _composes(plan: Plan) -> bool:
    try:
        conflicts.check(plan)
    except PlanError:
        return False
    return True


def uncompiled_variant(plan: Plan) -> Plan:
    """The plan that runs the blocks' own code."""
    return plan.with_(compile="none")


def _plan(**values: object) -> Plan:
    """Axes of one device, and what is None, are left out."""
    return Plan.of(
        **{
            key: value
            for key, value in values.items()
            if value is not None and (key, value) not in _ALONE
        }
    )


_ALONE = [(axis, 1) for axis in Axes().sizes()]
