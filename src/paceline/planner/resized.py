"""The plan of a run that goes on with another number of ranks, with as few changed counts as
possible.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from paceline.base.errors import PlanError
from paceline.strategies.key_registry import key
from paceline.strategies.plan import Plan

_MOST_CHANGED = 3  # counts of a plan that may change: of axes, or of servers and workers


def resized(plan: Plan, world_size: int) -> Plan:
    """Return the plan under which a run goes on with this many ranks; a checkpoint of either
    resumes under the other.

    The cut of the model stays if possible. Next, as many counts of ranks as possible stay. Among
    the remaining plans, the one that holds the weights the least often is taken. If the plan gave
    each replica its own share of the batch, the shares become equal. No other key changes, so the
    global batch and the order of data do not change.

    Raises:
        PlanError: none of the plan's counts can be changed to that.

    >>> str(resized(Plan.parse("data=3 tensor=2"), 4))
    'data=2 tensor=2'
    """
    if plan.world_size == world_size:
        return plan
    candidates = list(_candidates(plan, world_size))
    if not candidates:
        raise PlanError(
            f"plan '{plan}' is for {plan.world_size} ranks, and its counts can't be changed so that it is "
            f"for {world_size}",
            hint="a plan with data= or shard= goes on with any number of ranks",
        )
    return min(
        candidates,
        key=lambda other: (
            other.model_cut != plan.model_cut,
            _num_changed(plan, other),
            other.num_copies,
            str(other),
        ),
    )


def _candidates(plan: Plan, world_size: int) -> Iterator[Plan]:
    counts = _counts(plan)
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for num_changed in range(1, 1 + min(_MOST_CHANGED, len(counts))):
        for *names, last in itertools.permutations(counts, num_changed):
            for sizes in itertools.product(divisors, repeat=len(names)):
                first = dict(zip(names, sizes, strict=True))
                # Bisection works because the number of ranks grows with each count.
                size = 1 + bisect_left(
                    range(1, world_size + 1),
                    world_size,
                    key=lambda size: _num_ranks(plan, {**first, last: size}),
                )
                if (
                    other := _changed(plan, {**first, last: size})
                ) is not None and other.world_size == world_size:
                    yield other


def _num_ranks(plan: Plan, counts: Mapping[str, int]) -> int:
    """Return the number of ranks; 0 for a plan that is not valid, for example because it has too
    few ranks.
    """
    other = _changed(plan, counts)
    return 0 if other is None else other.world_size


def _changed(plan: Plan, counts: Mapping[str, int]) -> Plan | None:
    """Return the plan with other counts of ranks; None if they contradict the rest of the plan."""
    for shares in dict.fromkeys((plan.modifiers.shares, "equal")):
        try:
            return plan.with_(**counts, shares=shares)
        except PlanError:
            continue
    return None


def _counts(plan: Plan) -> dict[str, int]:
    """Return the keys of a plan that count ranks, if their count is above one."""
    return {
        name: value
        for name, value in plan.values().items()
        if isinstance(value, int) and (spec := key(name)) is not None and spec.counts_ranks
    }


def _num_changed(plan: Plan, other: Plan) -> int:
    before, after = _counts(plan), _counts(other)
    return sum(before.get(name, 1) != after.get(name, 1) for name in before.keys() | after.keys())
