"""The cost of batch norms that see the samples of all replicas, and the plans under which they
do."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.model.cost.profile import Segment
from paceline.simulate.program import Collective
from paceline.strategies.costs import Step, small_all_reduce
from paceline.strategies.plan import Plan
from paceline.strategies.plan_fields import AllReduce


def joins_statistics(plan: Plan) -> bool:
    """Whether replicas join the statistics of their batch norms.

    They do if each processes its part of the window as one micro-batch.
    """
    return isinstance(plan.sync, AllReduce) and plan.replicas > 1 and plan.num_microbatches == 1


def sums(step: Step, segment: Segment) -> Iterator[Collective]:
    """Yield the sums over replicas of a segment's forward. Its backward has the same sums.

    Each batch norm sums two figures of each channel, and two more.
    """
    if joins_statistics(step.plan):
        for channels in segment.forward.normed_channels:
            yield small_all_reduce(
                8 * (2 * channels + 2),
                step.plan.replicas,
                name="batch norm",
                stride=step.plan.axes.tensor,
            )
