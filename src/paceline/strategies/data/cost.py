"""The cost that replicas add to a step: they sum their buckets of gradients, during backward or
after it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.model.cost.profile import Parameter, Profile
from paceline.simulate.program import COMPUTE, NETWORK, Allocate, Collective, Compute, Event
from paceline.strategies.compress.size import PASSES, sent_bytes
from paceline.strategies.costs import ADDED, Footprint, HookPoint, Hooks, Step, small_all_reduce
from paceline.strategies.data.buckets import LARGEST_BUCKET_BYTES, assign
from paceline.strategies.plan import Plan

_AT_THE_END = -1  # after the backward of every segment
COPIED = 2  # bytes moved per byte of a gradient that is copied


def enter(step: Step) -> Hooks:
    """Return the events of the buckets' sums.

    CPU ranks of one host sum their buckets in shared memory, and all others over the network.
    Compressed buckets always use the network.
    """
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
        """Allocate memory for communication.

        Gradients of whole parameters are in the buckets and need no more memory. Those of shards
        are copied in and out. Shared pages count for every rank that touches them, and each rank
        sums its part of all ranks' buckets.
        """
        touched_bytes = gradient_bytes * (replicas - 1) / replicas if shared else 0
        residual_bytes = gradient_bytes if form in ("topk", "powersgd") else 0
        yield Allocate(
            "communication", touched_bytes + (gradient_bytes if copied else 0) + residual_bytes
        )

    def begin(point: HookPoint) -> Iterable[Event]:
        """Set the buckets to zero on a CPU, where backward adds to them."""
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
            yield small_all_reduce(4, replicas)  # wait until all ranks have arrived
            # For its part, a rank adds the values of all other ranks and copies the sum to each of
            # them.
            yield Compute(moved_bytes=(ADDED + COPIED) * (replicas - 1) / replicas * gradient_bytes)
            yield small_all_reduce(4, replicas)  # wait until all ranks are done
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
    """A bucket of gradients that is reduced at once."""

    num_bytes: float
    # The shapes of the whole tensors; matrices as (rows, columns).
    shapes: tuple[tuple[int, ...], ...]
    item_bytes: int
    # The number of equal buckets that are sent together; below 1 if the bucket waits for more
    # gradients.
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
    """Yield the events of a bucket's reduction over the network, `times` times a step.

    A compressed reduction is priced like an all-reduce that sends as many bytes, although its
    number of messages differs slightly.
    """
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
    part = bucket.num_bytes / whole_bytes if whole_bytes else 0.0  # below 1 for a shard
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
        is_compressed=True,
    )


def bucket_of(parameters: Sequence[Parameter], num_bytes: float, times: float = 1.0) -> Bucket:
    return Bucket(num_bytes, tuple(map(_shape, parameters)), _item_bytes(parameters[0]), times)


def _shape(parameter: Parameter) -> tuple[int, ...]:
    """Return a parameter's shape as (rows, columns), or as (elements,) if there is one column."""
    elements = parameter.num_bytes // _item_bytes(parameter)
    columns, rest = divmod(elements, max(parameter.rows, 1))
    return (parameter.rows, columns) if columns > 1 and not rest else (elements,)


def _item_bytes(parameter: Parameter) -> int:
    return {"float64": 8, "complex64": 8, "complex128": 16, "bfloat16": 2, "float16": 2}.get(
        parameter.dtype, 4
    )


def departures(step: Step) -> dict[int, list[Bucket]]:
    """Return the buckets that are sent after each segment's backward.

    Buckets are sent in a fixed order: a complete bucket waits for those before it. In a profile
    of repeated layers, each repetition of a segment sends its part of a bucket.
    """
    if step.profile.is_layered:
        return _of_layers(step)
    trainable = [p for p in step.profile.parameters if p.trainable]
    sizes_bytes = [step.footprint.gradients[p.name] for p in trainable]
    ready = _ready_after(step)
    buckets: dict[int, list[Bucket]] = defaultdict(list)
    latest = len(step.profile.segments)
    for bucket in assign(sizes_bytes, [p.dtype for p in trainable]):
        latest = min([latest, *(ready.get(trainable[i].name, _AT_THE_END) for i in bucket)])
        buckets[latest].append(
            bucket_of([trainable[i] for i in bucket], sum(sizes_bytes[i] for i in bucket))
        )
    return buckets


def _of_layers(step: Step) -> dict[int, list[Bucket]]:
    part = step.profile.reduced_part
    trainable = {p.name: p for p in step.profile.parameters if p.trainable}
    all_bytes = sum(step.footprint.gradients[p.name] * p.count for p in trainable.values())
    largest_bytes = min(LARGEST_BUCKET_BYTES, part * all_bytes)
    buckets: dict[int, list[Bucket]] = defaultdict(list)
    for number, segment in enumerate(step.profile.segments):
        for name in (name for name in segment.gradients if name in trainable):
            num_bytes = step.footprint.gradients[name] * part
            buckets[number].append(
                bucket_of([trainable[name]], largest_bytes, num_bytes / largest_bytes)
            )
    return buckets


def _ready_after(step: Step) -> dict[str, int]:
    """Return the segment after whose backward each gradient is ready.

    A parameter that is missing in the result has no gradient before the end.
    """
    ready: dict[str, int] = {}
    for number, segment in enumerate(step.profile.segments):
        names: Iterable[str] = segment.gradients
        if step.footprint.gradients_by_unit:
            names = [p.name for p in step.profile.owned_by(segment.unit)] if segment.unit else ()
        for name in names:
            ready.setdefault(name, number)  # backward reaches a unit's first segment last
    return ready


def hold(footprint: Footprint, plan: Plan, profile: Profile) -> Footprint:
    return replace(footprint, gradients_kept=not footprint.gradients_by_unit)
