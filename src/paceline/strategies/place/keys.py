"""The plan keys `place` and `parts`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.base.errors import PlanError
from paceline.strategies.axes import PARTS
from paceline.strategies.keys import Key, PlanKeys
from paceline.strategies.plan_fields import PlanFields, Schedule


def _problem(value: Any) -> str:
    if not isinstance(value, str):
        return f"place={value} must be auto or a file"
    if re.search(r"[\s,]", value):
        return (
            f"place={value}: spaces and commas part a plan's keys, so the file's name can have none"
        )
    return ""


PLACE = Key("place", "schedule", Schedule().place, "auto|FILE", lambda name, text: text, _problem)


def _complete(values: Mapping[str, Any]) -> Mapping[str, Any]:
    if "place" in values and "parts" not in values:
        raise PlanError(
            f"place={values['place']} needs the number of parts", hint="add parts=N, one a device"
        )
    return values


def _problems(plan: PlanFields) -> list[str]:
    problems = []
    if (plan.schedule.place != "") != (plan.axes.parts != 1):
        problems.append(
            f"parts={plan.axes.parts} and place={plan.schedule.place or 'nothing'}: modules are placed "
            "with place=auto|FILE and parts=N of at least 2"
        )
    if plan.axes.parts != 1 and plan.axes.pipeline != 1:
        problems.append("pipeline=N and parts=N: both say where the model's modules go")
    return problems


KEYS = PlanKeys(
    axes=(PARTS,),
    keys=(PLACE,),
    complete=_complete,
    problems=_problems,
)
