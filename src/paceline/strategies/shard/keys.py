"""The plan keys `shard` and `zero`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.base.errors import PlanError
from paceline.strategies.axes import Axis
from paceline.strategies.keys import Key, PlanKeys, is_count, whole_number
from paceline.strategies.synchronisation import AllReduce

if TYPE_CHECKING:
    from paceline.strategies.plan import Plan

ZERO = Key(
    "zero",
    "sync",
    3,
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


def _problems(plan: Plan) -> list[str]:
    if plan.zero == ZERO.default or plan.axes.shard > 1:
        return []
    return [f"zero={plan.zero} splits the shard axis, and the plan has none: add shard=N"]


KEYS = PlanKeys(
    axes=(Axis("shard", cuts_samples=True, cuts_weights=True),),
    keys=(ZERO,),
    sync=AllReduce,
    complete=_complete,
    problems=_problems,
)
