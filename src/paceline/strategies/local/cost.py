"""The cost of local steps: a part of an outer step in each step, and memory for the outer state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.model.cost.profile import Parameter
from paceline.simulate.program import COMPUTE, NETWORK, Allocate, Collective, Compute, Event
from paceline.strategies.costs import HookPoint, Hooks, Step
from paceline.strategies.data.buckets import assign as assign_buckets
from paceline.strategies.data.cost import Bucket, bucket_of, reduce
from paceline.strategies.local.schedule import assign, delay_steps


def enter(step: Step) -> Hooks:
    """Return a step's part of the events of an outer step, which is 1 / `local`.

    Fragments are transferred during the compute of later steps.
    """
    order, replicas = step.plan.outer_steps, step.plan.axes.data
    assert order is not None
    trainable = [p for p in step.profile.parameters if p.trainable]
    whole_bytes = sum(p.num_bytes for p in trainable)
    copies = 3 if order.outer == "diloco" else 2  # shared weights, pseudo-gradient, momentum
    stream = NETWORK if delay_steps(local=order.local, fragments=order.fragments) else COMPUTE

    def start(point: HookPoint) -> Iterable[Event]:
        yield Allocate("communication", copies * whole_bytes)

    def update(point: HookPoint) -> Iterable[Event]:
        """Let ranks exchange figures of steps and parameters once a fragment, and send each
        fragment once a round."""
        seldom = 1.0 / order.local
        met_bytes = 8 * (2 * order.local / order.fragments + 3 + len(trainable))
        yield Collective(
            "all_reduce",
            met_bytes,
            replicas,
            name="meet",
            stream=COMPUTE,
            times=order.fragments * seldom,
        )
        for bucket in _buckets(trainable, order.fragments):
            yield from reduce(
                step.plan.modifiers.compress,
                bucket,
                replicas,
                name="outer",
                stream=stream,
                times=seldom,
            )
        # The pseudo-gradient is computed and weighted, momentum and shared weights are updated, and
        # the replica's own weights are set.
        yield Compute(moved_bytes=(5 + 5 * (copies - 1)) * whole_bytes * seldom, part="optimizer")

    return {"start": start, "update": update}


def _buckets(trainable: Sequence[Parameter], fragments: int) -> list[Bucket]:
    """Return the buckets of all fragments."""
    buckets = []
    for fragment in assign([p.num_bytes for p in trainable], min(fragments, len(trainable))):
        parameters = [trainable[i] for i in fragment]
        for bucket in assign_buckets(
            [p.num_bytes for p in parameters], [p.dtype for p in parameters]
        ):
            in_bucket = [parameters[i] for i in bucket]
            buckets.append(bucket_of(in_bucket, sum(p.num_bytes for p in in_bucket)))
    return buckets
