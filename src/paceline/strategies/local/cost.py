"""What local steps add to a step: an outer step every so often, and what it needs beside the weights."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.simulate.program import COMPUTE, NETWORK, Allocate, Collective, Compute, Event
from paceline.strategies.costs import HookPoint, Hooks, Step
from paceline.strategies.data.buckets import assign as assign_buckets
from paceline.strategies.data.cost import Bucket, item_bytes, reduce, shape_of
from paceline.strategies.local.schedule import assign, delay_steps


def enter(step: Step) -> Hooks:
    """A step's part of an outer step: 1 in `local`. Fragments travel beside the compute of later steps."""
    order, replicas = step.plan.outer_steps, step.plan.axes.data
    assert order is not None
    trainable = [p for p in step.profile.parameters if p.trainable]
    whole_bytes = sum(p.num_bytes for p in trainable)
    copies = 3 if order.outer == "diloco" else 2  # shared weights, the way from them, momentum
    stream = NETWORK if delay_steps(local=order.local, fragments=order.fragments) else COMPUTE

    def start(point: HookPoint) -> Iterable[Event]:
        yield Allocate("communication", copies * whole_bytes)

    def update(point: HookPoint) -> Iterable[Event]:
        """Ranks meet about their steps' figures and parameters once a fragment, and send each fragment once a round."""
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
        for bucket in _buckets(step):
            yield from reduce(
                step.plan.modifiers.compress,
                bucket,
                replicas,
                name="outer",
                stream=stream,
                times=seldom,
            )
        # The way is made and weighed, momentum and shared weights are updated, and the replica's are set.
        yield Compute(moved_bytes=(5 + 5 * (copies - 1)) * whole_bytes * seldom, part="optimizer")

    return {"start": start, "update": update}


def _buckets(step: Step) -> list[Bucket]:
    """Of all fragments."""
    order = step.plan.outer_steps
    trainable = [p for p in step.profile.parameters if p.trainable]
    buckets = []
    for fragment in assign(
        [p.num_bytes for p in trainable], min(order.fragments, len(trainable)) if order else 1
    ):
        parameters = [trainable[i] for i in fragment]
        for bucket in assign_buckets(
            [p.num_bytes for p in parameters], [p.dtype for p in parameters]
        ):
            in_bucket = [parameters[i] for i in bucket]
            buckets.append(
                Bucket(
                    sum(p.num_bytes for p in in_bucket),
                    tuple(map(shape_of, in_bucket)),
                    item_bytes(in_bucket[0]),
                )
            )
    return buckets
