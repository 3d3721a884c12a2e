"""`gossip=N`: N replicas take steps of their own, and each averages its weights with two neighbours on a ring.

No sum over all replicas is waited for: a replica exchanges its weights with its neighbours alone, and what one learns
travels around the ring step by step. Source: Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized
Algorithms?" (D-PSGD).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline import Plan
from paceline.simulate.program import COMPUTE, Allocate, Collective, Compute, Event
from paceline.strategies.axes import Axis
from paceline.strategies.costs import CostModel, HookPoint, Hooks, Step
from paceline.strategies.keys import PlanKeys
from paceline.strategies.strategy import Conflict, Strategy

if TYPE_CHECKING:
    from paceline.strategies.limits import DeviceCounts, Limits

AXIS = Axis("gossip", cuts_samples=True)
BUFFERS = 3  # copies of the weights: what is sent, and what comes from each of two neighbours


def num_replicas(plan: Plan) -> int:
    return plan.axes.sizes().get(AXIS.name, 1)


def enter(step: Step) -> Hooks:
    """After the update the weights go to two neighbours, whose weights come; then all three are averaged."""
    replicas = num_replicas(step.plan)
    weights_bytes = sum(p.num_bytes * p.count for p in step.profile.parameters if p.trainable)

    def start(point: HookPoint) -> Iterable[Event]:
        yield Allocate("communication", BUFFERS * weights_bytes)

    def update(point: HookPoint) -> Iterable[Event]:
        # A ring's all-reduce of B bytes sends 2 B (N - 1) / N from each rank;
        # two neighbours are sent 2 B.
        yield Collective(
            "all_reduce",
            weights_bytes * replicas / (replicas - 1),
            replicas,
            name="gossip",
            stream=COMPUTE,
        )
        yield Compute(
            moved_bytes=2 * (BUFFERS + 1) * weights_bytes,
            part="optimizer",
        )

    return {"start": start, "update": update}


def problems(plan: Plan) -> list[str]:
    others = [
        f"{axis}={size}"
        for axis, size in plan.axes.sizes().items()
        if axis != AXIS.name and size > 1
    ]
    if not others:
        return []
    return [
        f"gossip={num_replicas(plan)} and {' '.join(others)} don't compose: "
        "a step is taken by one rank, which holds the whole model and averages "
        "all of it"
    ]


def plans(limits: Limits, shape: DeviceCounts) -> Iterator[Plan]:
    yield Plan.of(gossip=shape.num_devices)


def exact(plan: Plan) -> Plan:
    """Replicas whose gradients meet in every step."""
    axes = replace(plan.axes, others=(), data=num_replicas(plan))
    return replace(plan, axes=axes)


STRATEGY = Strategy(
    name="gossip=N",
    is_active=lambda plan: num_replicas(plan) > 1,
    keys=PlanKeys(
        axes=(AXIS,),
        problems=problems,
        exact=exact,
        relaxes=lambda plan: (
            "replicas take steps on their own samples and average with two neighbours after each"
        ),
    ),
    conflicts=(
        Conflict(
            "gossip=N",
            "each replica would skip steps of its own, at a loss scale of its own",
            'data=N, or precision="bf16" in the job',
            lambda plan: num_replicas(plan) > 1,
            of_job='precision="fp16"',
        ),
    ),
    plans=plans,
    cost=CostModel(enter),
    run="paceline_gossip.run",
    refuses={
        "closures": "replicas that take steps of their own would each follow another loss",
        "spikes": "replicas take steps of their own, and don't know each other's losses",
    },
)
