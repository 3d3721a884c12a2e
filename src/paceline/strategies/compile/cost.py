"""What compiled blocks change: their small operators are fused, and a run starts later."""

from __future__ import annotations

from dataclasses import replace

from paceline.plans import Plan
from paceline.profile.profile import Affine, Profile, Segment, Work
from paceline.software import Software
from paceline.strategies.costs import Hooks, Room, Step

# What fused kernels read and write of the bytes that the operators they consist of do one by one, and how many of them
# are left; seconds that the first compilation of a machine takes on its own, and those of every operator of a block,
# forward and backward. Fitted on one job, the byte GPT of `benchmarks.compile`, on a busy machine; see docs/compile.md.
FUSED_BYTES = 0.1
FUSED_OPERATORS = 0.5
FIRST_S = 10.0
OPERATOR_S = 0.3


def is_active(plan: Plan) -> bool:
    return plan.modifiers.compile == "blocks"


def narrow(profile: Profile, plan: Plan, software: Software) -> Profile:
    """Memory is priced as without compiling: fused kernels keep as much for backward, or less."""
    return replace(profile, segments=tuple(
        replace(segment, forward=_fused(segment.forward), backward=_fused(segment.backward))
        if _is_compiled(segment, profile) else segment for segment in profile.segments))


def start_s(profile: Profile, plan: Plan) -> float:
    """Seconds of compiling with an empty cache: blocks that do the same work are compiled once. Ranks compile one after
    the other, and all but the first find the code in the cache."""
    kinds = {_kind(segment): segment.forward.operators + segment.backward.operators
             for segment in profile.segments if _is_compiled(segment, profile)}
    return FIRST_S + OPERATOR_S * sum(kinds.values())


def _is_compiled(segment: Segment, profile: Profile) -> bool:
    return bool(segment.unit) or not profile.units  # a model without units is compiled whole


def _kind(segment: Segment) -> tuple[object, ...]:
    """What segments that are alike have in common."""
    return segment.forward, segment.backward, segment.kept_bytes, segment.output_bytes


def _fused(work: Work) -> Work:
    return replace(work, moved_bytes=_times(FUSED_BYTES, work.moved_bytes),
                   function_bytes=_times(FUSED_BYTES, work.function_bytes),
                   operators=FUSED_OPERATORS * work.operators)


def _times(factor: float, figure: Affine) -> Affine:
    return Affine(factor * figure.fixed, factor * figure.per_sample)


def enter(step: Step) -> Hooks:
    """Nothing happens beside the work itself."""
    return {}


ROOM = Room(is_active=is_active, enter=enter, narrow=narrow, start_s=start_s)
