"""What replicas add to a step: an all-reduce a bucket of gradients, beside the backward that is still going on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from paceline.plan import Plan
from paceline.profile.profile import Profile
from paceline.simulate.program import Allocate, Collective, Compute, Event
from paceline.strategies.costs import Held, Hooks, Moment, Room, Step
from paceline.strategies.data.buckets import assign

# What gloo's copying takes from the cores that also compute, for each byte a rank sends: 0.41 to 0.54 CPU seconds
# a GB, both ends together, measured over loopback. The waiting is hidden behind backward, the copying is not.
GLOO_S_PER_BYTE = 0.45e-9
_AT_THE_END = -1  # after the backward of every segment


def enter(step: Step) -> Hooks:
    leaving = departures(step)
    total = sum(sum(sizes) for sizes in leaving.values())

    replicas = step.plan.axes.data
    copying_s = GLOO_S_PER_BYTE * 2 * (replicas - 1) / replicas if step.device_kind == "cpu" else 0.0

    copied = step.held.gradients_by_unit

    def start(at: Moment) -> Iterable[Event]:
        """Gradients live in the buckets, unless they are shards: those are copied in and out."""
        yield Allocate("communication", total if copied else 0)

    def send(segment: int) -> Iterable[Event]:
        for num_bytes in leaving[segment]:
            yield Compute(moved_bytes=2 * num_bytes if copied else 0, operators=1, fixed_s=copying_s * num_bytes)
            yield Collective("all_reduce", num_bytes, replicas, name="buckets")

    def after_backward(at: Moment) -> Iterable[Event]:
        return send(at.segment) if step.is_last(at) else ()

    def done(at: Moment) -> Iterable[Event]:
        return send(_AT_THE_END) if step.is_last(at) else ()

    def finish(at: Moment) -> Iterable[Event]:
        yield Compute(moved_bytes=2 * total if copied else 0, after=("buckets",) if total else ())

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
