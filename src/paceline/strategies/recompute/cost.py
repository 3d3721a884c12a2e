"""The cost of recomputation: the forward of each unit, or of attention alone, runs again in
backward.

"full" keeps only a unit's input. Its second forward ends as soon as it has made the last tensor
that backward needs, so that a last product is not repeated (torch's `set_checkpoint_early_stop`).
"selective" frees the tensors between attention's products, which need much memory and little time.
Fused attention never keeps them. Sources: Chen et al. 2016; Korthikanti et al. 2022.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.model.cost.profile import Affine, Segment, Work
from paceline.simulate.allocator import holes_of_freed
from paceline.simulate.program import Allocate, Compute, Event, free
from paceline.strategies.costs import HookPoint, Hooks, Step, compute

# RECOMPUTED_S: Python's time around a unit's second forward on a CPU, for the module's state and
# random numbers. KEPT_TENSOR_S: the time of two hooks for each tensor that autograd keeps. Measured
# on chains of eight tiny blocks; see docs/formulas.md.
RECOMPUTED_S, KEPT_TENSOR_S = 0.28e-3, 16e-6


def enter(step: Step) -> Hooks:
    is_selective = step.plan.modifiers.recompute == "selective"

    def spared(segment: Segment, samples: float) -> float:
        """Return the bytes that are not kept.

        A segment's input counts as another segment's output.
        """
        if is_selective:
            return segment.core.kept_bytes.at(samples) if segment.core else 0.0
        return max(0.0, segment.kept_bytes.at(samples) - segment.output_bytes.at(samples))

    def done_again(segment: Segment) -> tuple[Work, Affine]:
        """Return the repeated work, and its peak memory."""
        if is_selective:
            return (
                (segment.core.forward, segment.core.kept_bytes)
                if segment.core
                else (Work(), Affine())
            )
        # A model without units is recomputed whole. There, torch stops early only in the last
        # segment.
        again = segment.again if step.software.stops_recomputing and segment.unit else None
        return again or segment.forward, segment.forward_peak_bytes

    def is_recomputed(segment: Segment) -> bool:
        """Whether a segment is recomputed.

        Units are recomputed; a model without units is recomputed whole. Segments that keep nothing
        for backward are not.
        """
        return (bool(segment.unit) or not step.profile.units) and segment.backward != Work()

    def let_go(point: HookPoint) -> Iterable[Event]:
        segment, samples = step.segment(point), step.samples(point)
        if is_recomputed(segment):
            yield free("activations", spared(segment, samples))
            if point.microbatch == 0:
                yield from holes_of_freed(step.device_kind, spared(segment, samples))

    def again(point: HookPoint) -> Iterable[Event]:
        segment, samples = step.segment(point), step.samples(point)
        if is_recomputed(segment):
            work, peak = done_again(segment)
            yield Allocate("activations", peak.at(samples))
            yield compute(work, samples)
            if step.device_kind == "cpu" and not is_selective:
                yield Compute(fixed_s=RECOMPUTED_S + KEPT_TENSOR_S * segment.kept_tensors)
            yield free("activations", peak.at(samples))
            yield Allocate("activations", spared(segment, samples))

    return {"after_forward": let_go, "before_backward": again}
