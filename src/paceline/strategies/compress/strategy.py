"""The strategy `compress`: replicas send each other fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.strategies.compress.keys import COMPRESSIONS, KEYS
from paceline.strategies.plan import Plan
from paceline.strategies.strategy import Conflict, Strategy

if TYPE_CHECKING:
    from paceline.strategies.limits import DeviceCounts, Limits


def _plans(limits: Limits, shape: DeviceCounts) -> Iterator[Plan]:
    for compress in COMPRESSIONS[1:]:
        yield Plan.of(data=shape.num_devices, compress=compress)


STRATEGY = Strategy(
    name="compress",
    is_active=lambda plan: plan.modifiers.compress != "none",
    keys=KEYS,
    conflicts=(
        Conflict(
            "compress=powersgd with shard=N or tensor=N",
            "it approximates whole matrices, and ranks hold parts of them",
            "compress=int8 or topk",
            lambda plan: (
                plan.modifiers.compress == "powersgd" and max(plan.axes.shard, plan.axes.tensor) > 1
            ),
        ),
        Conflict(
            "compress=topk or powersgd",
            "what a step leaves out of a gradient is added to the next one, and an "
            "infinite one would stay there for good",
            'compress=int8 or bf16, or precision="bf16" in the job',
            lambda plan: plan.modifiers.compress in ("topk", "powersgd"),
            of_job='precision="fp16"',
        ),
    ),
    family=lambda plan: f"compress={plan.modifiers.compress}",
    plans=_plans,
)
