"""What full recomputation changes: each unit keeps its output alone, and its forward runs again in backward."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.profile.profile import Segment
from paceline.simulate.program import Allocate, Event, free
from paceline.strategies.costs import Hooks, Moment, Room, Step, compute

# What the C library's heap keeps of the bytes let go, in holes too small for what comes next. Measured with glibc
# 2.36 on byte GPTs of 4 and 12 layers; see docs/prediction.md.
CPU_HOLES_LEFT = 0.5


def enter(step: Step) -> Hooks:
    def spared(segment: Segment, samples: float) -> float:
        """Bytes not kept. A segment's input is another one's output, and is counted there."""
        return max(0.0, segment.kept_bytes.at(samples) - segment.output_bytes.at(samples))

    def is_recomputed(segment: Segment) -> bool:
        return bool(segment.unit) or not step.profile.units  # a model without units is recomputed whole

    def let_go(at: Moment) -> Iterable[Event]:
        segment, samples = step.segment(at), step.samples(at)
        if is_recomputed(segment):
            yield free("activations", spared(segment, samples))
            if step.device_kind == "cpu" and at.microbatch == 0:
                yield Allocate("holes", CPU_HOLES_LEFT * spared(segment, samples))

    def again(at: Moment) -> Iterable[Event]:
        segment, samples = step.segment(at), step.samples(at)
        if is_recomputed(segment):
            peak = segment.forward_peak_bytes.at(samples)
            yield Allocate("activations", peak)
            yield compute(segment.forward, samples)
            yield free("activations", peak)
            yield Allocate("activations", spared(segment, samples))

    return {"after_forward": let_go, "before_backward": again}


ROOM = Room(is_active=lambda plan: plan.modifiers.recompute == "full", enter=enter)
