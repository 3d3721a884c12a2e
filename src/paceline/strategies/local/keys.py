"""The plan keys `local`, `outer` and `fragments`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from paceline.base.errors import PlanError
from paceline.strategies.keys import PlanKeys, choice, count
from paceline.strategies.plan_fields import AllReduce, PlanFields, Synchronisation

OuterName = Literal["average", "diloco"]
OUTERS: tuple[OuterName, ...] = get_args(OuterName)
LOCAL = count("local", "sync", "H", default=None)
OUTER = choice("outer", "sync", OUTERS, default="average")
FRAGMENTS = count("fragments", "sync", "F")


@dataclass(frozen=True, slots=True)
class Local(Synchronisation):
    """The synchronisation of replicas that take steps of their own and meet in outer steps."""

    # Steps from one outer step to the next. 1 with outer="average" is the synchronous case, which
    # sums gradients.
    local: int
    # How the mean pseudo-gradient updates the shared weights: "average" subtracts it;
    # "diloco" uses Nesterov momentum.
    outer: OuterName = OUTER.default
    # Number of groups of parameters whose outer steps are staggered over the `local` steps.
    fragments: int = FRAGMENTS.default


def outer_steps(plan: PlanFields) -> Local | None:
    """Return the settings of a plan's outer steps; None if replicas combine their gradients in
    every step."""
    return plan.sync if isinstance(plan.sync, Local) and plan.sync != Local(1) else None


def _complete(values: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in (OUTER, FRAGMENTS):
        if key.name in values and "local" not in values:
            raise PlanError(
                f"{key.name}={values[key.name]} is about outer steps, and the plan has none",
                hint="add local=H",
            )
    if "local" in values and "zero" in values:
        raise PlanError(
            f"zero={values['zero']} and local={values['local']} don't compose: a local step is taken by "
            "one rank, which must hold the whole model"
        )
    return values


def _problems(plan: PlanFields) -> list[str]:
    if not isinstance(order := plan.sync, Local):
        return []
    problems = []
    if order.fragments > order.local:
        problems.append(
            f"fragments={order.fragments} and local={order.local}: each fragment has an outer step of its "
            "own among the local ones, so there can't be more of them"
        )
    elif plan.axes.data == 1:
        problems.append(f"local={order.local} is about replicas, and the plan has none: add data=N")
    return problems


def _relaxes(plan: PlanFields) -> str:
    if (order := outer_steps(plan)) is None:
        return ""
    return f"replicas take {order.local} steps on their own samples between outer steps" + (
        " with Nesterov momentum" if order.outer == "diloco" else ""
    )


KEYS = PlanKeys(
    keys=(LOCAL, OUTER, FRAGMENTS),
    sync=Local,
    complete=_complete,
    problems=_problems,
    relaxes=_relaxes,
    exact=lambda plan: plan if outer_steps(plan) is None else replace(plan, sync=AllReduce()),
)
