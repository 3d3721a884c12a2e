"""The plan key `compress`."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from paceline.strategies.keys import PlanKeys, choice
from paceline.strategies.plan_fields import CompressName, Modifiers, PlanFields
from paceline.strategies.server.keys import Servers

COMPRESSIONS: tuple[CompressName, ...] = get_args(CompressName)
COMPRESS = choice("compress", "modifiers", COMPRESSIONS, default=Modifiers().compress)


def _problems(plan: PlanFields) -> list[str]:
    if plan.modifiers.compress == "none" or plan.axes.data != 1 or isinstance(plan.sync, Servers):
        return []
    return [
        f"compress={plan.modifiers.compress} is about what replicas send each other, and the plan has none: add "
        "data=N"
    ]


def _relaxes(plan: PlanFields) -> str:
    if plan.modifiers.compress == "none":
        return ""
    senders = "workers and servers" if isinstance(plan.sync, Servers) else "replicas"
    return f"what {senders} send each other is compressed to {plan.modifiers.compress}"


KEYS = PlanKeys(
    keys=(COMPRESS,),
    problems=_problems,
    relaxes=_relaxes,
    exact=lambda plan: replace(plan, modifiers=replace(plan.modifiers, compress="none")),
)
