"""What replicas add to a step: the sum of their buckets of gradients, beside backward or after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from paceline.plan import Plan
from paceline.profile.profile import Profile
from paceline.simulate.program import COMPUTE, Allocate, Collective, Compute, Event
from paceline.strategies.costs import Held, Hooks, Moment, Room, Step
from paceline.strategies.data.buckets import assign

_AT_THE_END = -1  # after the backward of every segment


def enter(step: Step) -> Hooks:
    """Ranks on CPUs of one host sum their buckets in memory that they share, all others over the network."""
    replicas = step.plan.axes.data
    leaving = departures(step)
    total = sum(sum(sizes) for sizes in leaving.values())
    copied = step.held.gradients_by_unit
    shared = step.device_kind == "cpu"

    def start(at: Moment) -> Iterable[Event]:
        """Gradients live in the buckets, unless they are shards: those are copied in and out. Pages that are shared
        count for every rank that touches them: each sums its part of all buckets."""
        touched = total * (replicas - 1) / replicas if shared else 0
        yield Allocate("communication", touched + (total if copied else 0))

    def send(segment: int) -> Iterable[Event]:
        for num_bytes in leaving[segment]:
            if copied:
                yield Compute(moved_bytes=2 * num_bytes, operators=1)
            if not shared:
                yield Collective("all_reduce", num_bytes, replicas, name="buckets")

    def after_backward(at: Moment) -> Iterable[Event]:
        return send(at.segment) if step.is_last(at) else ()

    def done(at: Moment) -> Iterable[Event]:
        return send(_AT_THE_END) if step.is_last(at) else ()

    def finish(at: Moment) -> Iterable[Event]:
        if shared and total:
            yield Collective("all_reduce", 4, replicas, stream=COMPUTE)  # all are here
            yield Compute(moved_bytes=2 * total)  # every rank's part is read, the sum written to every rank
            yield Collective("all_reduce", 4, replicas, stream=COMPUTE)  # all are done
        yield Compute(moved_bytes=2 * total if copied else 0, after=("buckets",) if total and not shared else ())

    return {"start": start, "after_backward": after_backward, "done": done, "finish": finish}


def departures(step: Step) -> dict[int, list[int]]:
    """Bytes of the buckets that leave after each segment's backward.

    Buckets leave in their own order: one that is complete waits for those before it.
    """
    trainable = [p for p in step.profile.parameters if p.trainable]
    sizes = [step.held.gradients[p.name] for p in trainable]
    ready = _ready_after(step)
    found: dict[int, list[int]] = defaultdict(list)
    latest = len(step.profile.segments)
    for bucket in assign(sizes, [p.dtype for p in trainable]):
        latest = min([latest, *(ready.get(trainable[i].name, _AT_THE_END) for i in bucket)])
        found[latest].append(sum(sizes[i] for i in bucket))
    return found


def _ready_after(step: Step) -> dict[str, int]:
    """The segment after whose backward each gradient is ready; a parameter that is missing has none before the end."""
    found: dict[str, int] = {}
    for number, segment in enumerate(step.profile.segments):
        names: Iterable[str] = segment.gradients
        if step.held.gradients_by_unit:
            names = [p.name for p in step.profile.owned_by(segment.unit)] if segment.unit else ()
        for name in names:
            found.setdefault(name, number)  # backward comes to a unit's first segment last
    return found


def hold(held: Held, plan: Plan, profile: Profile) -> Held:
    return replace(held, gradients_kept=not held.gradients_by_unit)


ROOM = Room(is_active=lambda plan: plan.axes.data > 1, enter=enter, hold=hold)
