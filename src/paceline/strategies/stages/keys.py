"""The plan keys of pipelines (`pipeline`, `schedule`, `virtual`) and of placed parts (`place`,
`parts`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from paceline.base.errors import PlanError
from paceline.strategies.axes import PARTS, PIPELINE
from paceline.strategies.keys import Key, PlanKeys, choice, count
from paceline.strategies.plan_fields import PlanFields, Schedule, ScheduleName

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
SCHEDULE = choice("schedule", "schedule", SCHEDULES, default=Schedule().schedule)
VIRTUAL = count("virtual", "schedule", "V")
LEAST_VIRTUAL = 2  # smallest number of stages per rank in the interleaved schedule


def splits_backward(plan: PlanFields) -> bool:
    """Whether a stage's backward consists of two actions: gradients of inputs, and gradients of
    weights."""
    return plan.schedule.schedule == "zero-bubble"


def _complete_pipeline(values: Mapping[str, Any]) -> Mapping[str, Any]:
    if values.get("pipeline", 1) != 1:
        values = {"microbatches": "auto", **values}
    else:
        for key in (SCHEDULE, VIRTUAL):
            if key.name in values:
                raise PlanError(
                    f"{key.name}={values[key.name]} is about a pipeline, and the plan has none",
                    hint="add pipeline=N",
                )
    return (
        {"virtual": LEAST_VIRTUAL, **values} if values.get("schedule") == "interleaved" else values
    )


def _pipeline_problems(plan: PlanFields) -> list[str]:
    order, problems = plan.schedule, []
    if (order.virtual > 1) != (order.schedule == "interleaved"):
        problems.append(
            f"virtual={order.virtual} contradicts schedule={order.schedule}: several stages a rank is what "
            "schedule=interleaved means"
        )
    if plan.axes.pipeline == 1 and any(
        getattr(order, key.name) != key.default for key in (SCHEDULE, VIRTUAL)
    ):
        problems.append(
            "schedule and virtual are about a pipeline, and the plan has none: add pipeline=N"
        )
    return problems


PIPELINE_KEYS = PlanKeys(
    axes=(PIPELINE,),
    keys=(SCHEDULE, VIRTUAL),
    complete=_complete_pipeline,
    problems=_pipeline_problems,
)


def _problem_of_place(value: Any) -> str:
    if not isinstance(value, str):
        return f"place={value} must be a number of parts or a file"
    if re.search(r"[\s,]", value):
        return (
            f"place={value}: spaces and commas part a plan's keys, so the file's name can have none"
        )
    return ""


PLACE = Key(
    "place",
    "schedule",
    Schedule().place,
    "N|FILE",
    lambda name, text: int(text) if re.fullmatch(r"\d+", text) else text,
    _problem_of_place,
    counts_ranks=True,
)


def _complete_place(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Split `place=N` into a number of parts and who places modules in them."""
    if "place" not in values:
        return values
    place = values["place"]
    if isinstance(place, int) == ("parts" in values):
        states = "states" if isinstance(place, int) else "needs"
        raise PlanError(
            f"place={place} {states} the number of parts",
            hint="place=N, or place=FILE parts=N, one a device",
        )
    return {**values, "place": "auto", "parts": place} if isinstance(place, int) else values


def _place_problems(plan: PlanFields) -> list[str]:
    problems = []
    if (plan.schedule.place != "") != (plan.axes.parts != 1):
        problems.append(
            f"parts={plan.axes.parts} and place={plan.schedule.place or 'nothing'}: modules are placed "
            "with place=N, or place=FILE and parts=N, of at least 2"
        )
    if plan.axes.parts != 1 and plan.axes.pipeline != 1:
        problems.append("pipeline=N and place=N: both say where the model's modules go")
    return problems


PLACE_KEYS = PlanKeys(
    axes=(PARTS,),
    keys=(PLACE,),
    complete=_complete_place,
    problems=_place_problems,
)
