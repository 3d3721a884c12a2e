"""The strategy `local`: replicas take steps of their own and meet in outer steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.strategies.costs import CostModel
from paceline.strategies.local.cost import enter
from paceline.strategies.local.keys import KEYS, Local
from paceline.strategies.plan import Plan
from paceline.strategies.strategy import Conflict, Strategy

if TYPE_CHECKING:
    from paceline.strategies.limits import DeviceCounts, Limits

LOCAL_STEPS = (10, 100)  # values that a search tries


def _plans(limits: Limits, shape: DeviceCounts) -> Iterator[Plan]:
    for local in LOCAL_STEPS:
        yield Plan.of(data=shape.num_devices, local=local, outer="diloco")
        yield Plan.of(data=shape.num_devices, local=local, outer="diloco", compress="int8")


STRATEGY = Strategy(
    name="local=H",
    is_active=lambda plan: plan.outer_steps is not None,
    keys=KEYS,
    conflicts=(
        Conflict(
            "local=H with shard=N, tensor=N, pipeline=N or place=N",
            "a local step is taken by one rank alone; ranks that hold parts of a replica would have to meet in it",
            "local=H with data=N, and microbatches=M or recompute=full where memory is short",
            lambda plan: isinstance(plan.sync, Local) and plan.world_size > plan.axes.data,
        ),
        Conflict(
            "local=H with compress=topk or powersgd",
            "what they leave out of a difference comes an outer step later, hundreds of local steps",
            "compress=int8 or bf16",
            lambda plan: (
                plan.outer_steps is not None and plan.modifiers.compress in ("topk", "powersgd")
            ),
        ),
        Conflict(
            "local=H",
            "each replica would skip steps of its own, at a loss scale of its own",
            'data=N or shard=N, or precision="bf16" in the job',
            lambda plan: plan.outer_steps is not None,
            of_job='precision="fp16"',
        ),
    ),
    family=lambda plan: f"local={plan.sync.local}" if isinstance(plan.sync, Local) else "",
    plans=_plans,
    cost=CostModel(enter),
    run="paceline.strategies.local.run",
    takes_all_models=True,
    refuses={
        "modes": "replicas that take steps of their own agree on the weights that are trained alone",
        "closures": "replicas that take steps of their own would each follow another loss",
        "spikes": "replicas take steps of their own, and learn each other's losses only when they meet",
    },
)
