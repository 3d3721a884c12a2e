"""The plan keys `shard` and `zero`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.base.errors import PlanError
from paceline.strategies.axes import SHARD
from paceline.strategies.keys import Key, PlanKeys, is_count, whole_number
from paceline.strategies.plan_fields import AllReduce, PlanFields

ZERO = Key(
    "zero",
    "sync",
    AllReduce().zero,
    "1|2|3",
    lambda name, text: whole_number(name, text, allowed="1|2|3"),
    lambda value: "" if is_count(value) and value <= 3 else f"zero={value} must be 1, 2 or 3",
)


def _complete(values: Mapping[str, Any]) -> Mapping[str, Any]:
    if "zero" in values and values.get("shard", 1) == 1:
        raise PlanError(
            f"zero={values['zero']} splits the shard axis, and the plan has none",
            hint="add shard=N",
        )
    return values


def _problems(plan: PlanFields) -> list[str]:
    if plan.zero == ZERO.default or plan.axes.shard > 1:
        return []
    return [f"zero={plan.zero} splits the shard axis, and the plan has none: add shard=N"]


KEYS = PlanKeys(
    axes=(SHARD,),
    keys=(ZERO,),
    sync=AllReduce,
    complete=_complete,
    problems=_problems,
)
