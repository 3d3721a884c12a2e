"""The strategies under which ranks hold stages of a model: consecutive ones along a pipeline, or
those of the modules that a placement assigns to a rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.base.errors import PlanError
from paceline.strategies.plan import Plan
from paceline.strategies.stages.keys import PIPELINE_KEYS, PLACE_KEYS, SCHEDULES, splits_backward
from paceline.strategies.strategy import Conflict, Strategy

if TYPE_CHECKING:
    from paceline.strategies.limits import Limits

MOST_VIRTUAL = 4  # largest number of stages per rank that a search tries


def _variants(plan: Plan, limits: Limits) -> Iterator[Plan]:
    """Yield the plan with all schedules that are possible."""
    for name in SCHEDULES:
        for virtual in range(2, MOST_VIRTUAL + 1) if name == "interleaved" else (1,):
            if plan.axes.pipeline * virtual > max(limits.layers, plan.axes.pipeline):
                continue
            if name == "interleaved" and plan.num_microbatches % plan.axes.pipeline:
                continue
            try:
                yield plan.with_(schedule=name, virtual=virtual)
            except PlanError:
                continue


PIPELINE = Strategy(
    name="pipeline=N",
    is_active=lambda plan: plan.axes.pipeline > 1,
    keys=PIPELINE_KEYS,
    conflicts=(
        Conflict(
            "schedule=zero-bubble with shard=N",
            "FSDP2 reduces gradients in hooks of a whole backward, and a backward in two parts passes them by: "
            "gradients come out wrong without an error",
            "schedule=1f1b or interleaved, or data=N in place of shard=N",
            lambda plan: splits_backward(plan) and plan.axes.shard > 1,
        ),
        Conflict(
            "schedule=zero-bubble with recompute=full",
            "each half of the backward would compute the forward again",
            "schedule=1f1b, which recomputes once",
            lambda plan: splits_backward(plan) and plan.modifiers.recompute == "full",
        ),
    ),
    code=lambda plan: (splits_backward(plan),),
    variants=_variants,
)

PLACE = Strategy(
    name="place=N",
    is_active=lambda plan: plan.axes.parts > 1,
    keys=PLACE_KEYS,
    is_priced_on_paper=False,
)
