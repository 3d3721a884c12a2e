"""What replicas add to a step: the sum of their buckets of gradients, beside backward or after it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from paceline.model.cost.profile import Parameter, Profile
from paceline.simulate.program import COMPUTE, NETWORK, Allocate, Collective, Compute, Event
from paceline.strategies.compress.size import PASSES, sent_bytes
from paceline.strategies.costs import ADDED, Footprint, HookPoint, Hooks, Step, small_all_reduce
from paceline.strategies.data.buckets import LARGEST_BUCKET_BYTES, assign
from paceline.strategies.plan import Plan

_AT_THE_END = -1  # after the backward of every segment
COPIED = 2  # bytes moved a byte of gradient that is copied


def enter(step: Step) -> Hooks:
    """Ranks on CPUs of one host sum their buckets in memory that they share, all others over the network; what is
    compressed goes over the network everywhere."""
    replicas, form = step.plan.axes.data, step.plan.modifiers.compress
    leaving = departures(step)
    gradient_bytes = sum(
        step.footprint.gradients[p.name] * p.count for p in step.profile.parameters if p.trainable
    )
    stride = step.plan.axes.shard * step.plan.axes.tensor
    at_once = step.software.overlaps or step.device_kind == "cpu"
    copied = step.footprint.gradients_by_unit
    shared = step.device_kind == "cpu" and form == "none"

    def start(point: HookPoint) -> Iterable[Event]:
        """Gradients live in the buckets, unless they are shards: those are copied in and out. Pages that are shared
        count for every rank that touches them: each sums its part of all buckets."""
        touched_bytes = gradient_bytes * (replicas - 1) / replicas if shared else 0
        residual_bytes = gradient_bytes if form in ("topk", "powersgd") else 0
        yield Allocate(
            "communication", touched_bytes + (gradient_bytes if copied else 0) + residual_bytes
        )

    def begin(point: HookPoint) -> Iterable[Event]:
        """Backward on a CPU adds to zeros in the buckets."""
        if point.microbatch == 0 and step.device_kind == "cpu":
            yield Compute(moved_bytes=gradient_bytes)

    def send(segment: int, repeat: int = 1) -> Iterable[Event]:
        for bucket in leaving[segment]:
            if copied:
                yield Compute(moved_bytes=2 * bucket.num_bytes * repeat, operators=1)
            if not shared:
                yield from reduce(
                    form,
                    bucket,
                    replicas,
                    name="buckets",
                    stride=stride,
                    times=repeat,
                    stream=NETWORK if at_once else COMPUTE,
                )

    def after_backward(point: HookPoint) -> Iterable[Event]:
        return send(point.segment) if step.is_last(point) and at_once else ()

    def done(point: HookPoint) -> Iterable[Event]:
        return send(_AT_THE_END) if step.is_last(point) and at_once else ()

    def finish(point: HookPoint) -> Iterable[Event]:
        if not at_once:
            for segment in leaving:
                yield from send(
                    segment, step.profile.segments[segment].repeat if segment >= 0 else 1
                )
        if shared and gradient_bytes:
            yield small_all_reduce(step, 4, replicas)  # all are here
            # Of its part a rank adds to one what each other holds, and copies the sum to each.
            yield Compute(moved_bytes=(ADDED + COPIED) * (replicas - 1) / replicas * gradient_bytes)
            yield small_all_reduce(step, 4, replicas)  # all are done
        yield Compute(
            moved_bytes=2 * gradient_bytes if copied else 0,
            after=("buckets",) if gradient_bytes and not shared else (),
        )

    return {
        "start": start,
        "begin": begin,
        "after_backward": after_backward,
        "done": done,
        "finish": finish,
    }


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is reduced at once.

    shapes: of its tensors, whole; matrices as (rows, columns). times: how many like it leave together; a part of one
        where more gradients are waited for.
    """

    num_bytes: float
    shapes: tuple[tuple[int, ...], ...]
    item_bytes: int
    times: float = 1.0


def reduce(
    form: str,
    bucket: Bucket,
    ranks: int,
    *,
    name: str,
    stream: str = NETWORK,
    times: float = 1.0,
    stride: int = 1,
) -> Iterable[Event]:
    """A bucket's reduction over the network, so many times a step. A compressed one takes as long as an all-reduce that
    sends as many bytes; its own steps are a few more or fewer."""
    times *= bucket.times
    if form == "none":
        yield Collective(
            "all_reduce",
            bucket.num_bytes,
            ranks,
            name=name,
            stream=stream,
            times=times,
            stride=stride,
        )
        return
    whole_bytes = bucket.item_bytes * sum(map(math.prod, bucket.shapes))
    part = bucket.num_bytes / whole_bytes if whole_bytes else 0.0  # a shard's
    message_bytes = sent_bytes(form, bucket.shapes, bucket.item_bytes, ranks) * part
    yield Compute(
        moved_bytes=times * PASSES[form] * bucket.num_bytes, operators=times * PASSES[form]
    )
    yield Collective(
        "all_reduce",
        message_bytes * ranks / (2 * (ranks - 1)),
        ranks,
        name=name,
        stream=stream,
        times=times,
        stride=stride,
    )


def shape_of(parameter: Parameter) -> tuple[int, ...]:
    """(rows, columns), or (elements,) where there is one column."""
    elements = parameter.num_bytes // item_bytes(parameter)
    columns, rest = divmod(elements, max(parameter.rows, 1))
    return (parameter.rows, columns) if columns > 1 and not rest else (elements,)


def item_bytes(parameter: Parameter) -> int:
    return {"float64": 8, "complex64": 8, "complex128": 16, "bfloat16": 2, "float16": 2}.get(
        parameter.dtype, 4
    )


def departures(step: Step) -> dict[int, list[Bucket]]:
    """The buckets that leave after each segment's backward.

    Buckets leave in their own order: one that is complete waits for those before it. Of a profile by dimensions each
    repetition sends its part of a bucket.
    """
    if step.profile.by_dimensions:
        return _by_dimensions(step)
    trainable = [p for p in step.profile.parameters if p.trainable]
    sizes_bytes = [step.footprint.gradients[p.name] for p in trainable]
    ready = _ready_after(step)
    buckets: dict[int, list[Bucket]] = defaultdict(list)
    latest = len(step.profile.segments)
    for bucket in assign(sizes_bytes, [p.dtype for p in trainable]):
        latest = min([latest, *(ready.get(trainable[i].name, _AT_THE_END) for i in bucket)])
        buckets[latest].append(
            Bucket(
                sum(sizes_bytes[i] for i in bucket),
                tuple(shape_of(trainable[i]) for i in bucket),
                item_bytes(trainable[bucket[0]]),
            )
        )
    return buckets


def _by_dimensions(step: Step) -> dict[int, list[Bucket]]:
    part = step.profile.reduced_part
    trainable = {p.name: p for p in step.profile.parameters if p.trainable}
    all_bytes = sum(step.footprint.gradients[p.name] * p.count for p in trainable.values())
    largest_bytes = min(LARGEST_BUCKET_BYTES, part * all_bytes)
    buckets: dict[int, list[Bucket]] = defaultdict(list)
    for number, segment in enumerate(step.profile.segments):
        for name in (name for name in segment.gradients if name in trainable):
            num_bytes = step.footprint.gradients[name] * part
            buckets[number].append(
                Bucket(
                    largest_bytes,
                    (shape_of(trainable[name]),),
                    item_bytes(trainable[name]),
                    times=num_bytes / largest_bytes,
                )
            )
    return buckets


def _ready_after(step: Step) -> dict[str, int]:
    """The segment after whose backward each gradient is ready; a parameter that is missing has none before the end."""
    ready: dict[str, int] = {}
    for number, segment in enumerate(step.profile.segments):
        names: Iterable[str] = segment.gradients
        if step.footprint.gradients_by_unit:
            names = [p.name for p in step.profile.owned_by(segment.unit)] if segment.unit else ()
        for name in names:
            ready.setdefault(name, number)  # backward comes to a unit's first segment last
    return ready


def hold(footprint: Footprint, plan: Plan, profile: Profile) -> Footprint:
    return replace(footprint, gradients_kept=not footprint.gradients_by_unit)
