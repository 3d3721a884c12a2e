"""What compiled blocks change: their small operators are fused, and a run starts later."""

from __future__ import annotations

from dataclasses import replace

from paceline.plans import Plan
from paceline.profile.profile import Affine, Fused, Profile, Segment, Work
from paceline.software import Software
from paceline.strategies.costs import Hooks, Step

# Seconds of a core that a machine's first compilation takes on its own (g++ tries the processor's instructions, and
# translates torch's headers), and those of each kernel, from tracing to g++. See docs/strategies/compile.md.
FIRST_S = 14.5
KERNEL_S = 0.85


def narrow(profile: Profile, plan: Plan, software: Software) -> Profile:
    """Memory is priced as without compiling: fused kernels keep as much for backward, or less. A compiled block is one
    function for autograd, which keeps tensors at its end: all of it is recomputed."""
    return replace(profile, segments=tuple(
        replace(segment, forward=_fused(segment.forward), backward=_fused(segment.backward), again=None)
        if _is_compiled(segment, profile) else segment for segment in profile.segments))


def start_s(profile: Profile, plan: Plan) -> float:
    """Seconds of compiling with an empty cache: blocks that do the same work are compiled once. Ranks compile one after
    the other, and all but the first find the code in the cache."""
    kinds = {_kind(segment): segment.forward.fused.kernels + segment.backward.fused.kernels
             for segment in profile.segments if _is_compiled(segment, profile)}
    return FIRST_S + KERNEL_S * sum(kinds.values())


def _is_compiled(segment: Segment, profile: Profile) -> bool:
    return bool(segment.unit) or not profile.units  # a model without units is compiled whole


def _kind(segment: Segment) -> tuple[object, ...]:
    """What segments that are alike have in common."""
    return segment.forward, segment.backward, segment.kept_bytes, segment.output_bytes


def _fused(work: Work) -> Work:
    """Arithmetic takes as long, and what operators hand each other is neither written nor read: that is plain traffic,
    also between functions, so that `moved_bytes` may fall below zero."""
    if work.fused == Fused():
        return work
    spared, moved = work.fused.spared_bytes, work.moved_bytes
    return replace(work, operators=work.operators - work.fused.spared_operators, fused=Fused(), spared=work.fused,
                   moved_bytes=Affine(moved.fixed - spared.fixed, moved.per_sample - spared.per_sample))


def enter(step: Step) -> Hooks:
    """Nothing happens beside the work itself."""
    return {}
