"""What recomputation changes: the forward of each unit, or of attention alone, runs again in backward.

"full" keeps a unit's input alone. Its second forward ends as soon as it has made the last tensor that backward needs: a
last product is not done again (torch's `set_checkpoint_early_stop`). "selective" lets go of what lies between
attention's products, which takes much memory and little time; fused attention never keeps it.
Sources: Chen et al. 2016; Korthikanti et al. 2022.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.model.cost.profile import Affine, Segment, Work
from paceline.simulate.allocator import holes_of_freed
from paceline.simulate.program import Allocate, Compute, Event, free
from paceline.strategies.costs import HookPoint, Hooks, Step, compute

# Python around a unit's second forward on a CPU: the module's state and random numbers; and two hooks of each tensor
# that autograd keeps. Measured on chains of eight tiny blocks; see docs/formulas.md.
RECOMPUTED_S, KEPT_TENSOR_S = 0.28e-3, 16e-6


def enter(step: Step) -> Hooks:
    is_selective = step.plan.modifiers.recompute == "selective"

    def spared(segment: Segment, samples: float) -> float:
        """Bytes not kept. A segment's input is another one's output, and is counted there."""
        if is_selective:
            return segment.core.kept_bytes.at(samples) if segment.core else 0.0
        return max(0.0, segment.kept_bytes.at(samples) - segment.output_bytes.at(samples))

    def done_again(segment: Segment) -> tuple[Work, Affine]:
        """The work, and the most that is alive in it."""
        if is_selective:
            return (
                (segment.core.forward, segment.core.kept_bytes)
                if segment.core
                else (Work(), Affine())
            )
        # In a model without units, which is recomputed whole, torch stops early in the last segment alone.
        again = segment.again if step.software.stops_recomputing and segment.unit else None
        return again or segment.forward, segment.forward_peak_bytes

    def is_recomputed(segment: Segment) -> bool:
        """Units; a model without them is recomputed whole. What nothing is kept of for backward never is."""
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
