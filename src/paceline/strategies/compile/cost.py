"""The cost of compiled blocks: their small operators are fused, and a run starts later."""

from __future__ import annotations

from dataclasses import replace

from paceline.base.errors import PlanError
from paceline.cluster.software import Software
from paceline.model.cost.profile import Affine, Fused, Profile, Segment, Work
from paceline.strategies.plan import Plan

# FIRST_S: core seconds that a machine's first compilation takes in addition: g++ tries the
# processor's instructions, and compiles torch's headers. KERNEL_S: core seconds of each kernel,
# from tracing to g++. See docs/formulas.md.
FIRST_S = 14.5
KERNEL_S = 0.85
NOTHING_COMPILED = "torch.compile takes no nn.RNN, nn.GRU or nn.LSTM, and the model, or each of its blocks, holds one"
WITHOUT = "leave out compile=blocks: the plan computes the same without it"


def narrow(profile: Profile, plan: Plan, software: Software) -> Profile:
    """Return the profile with the work of compiled blocks.

    Memory is priced as without compiling: fused kernels keep as much for backward, or less. To
    autograd, a compiled block is one function, which saves tensors at its end. Recomputing
    therefore repeats all of it.

    Raises:
        PlanError: torch.compile accepts none of the model's blocks.
    """
    if not plan.splits_model and set(profile.units or [""]) <= set(profile.recurrent):
        raise PlanError(NOTHING_COMPILED, hint=WITHOUT)
    return replace(
        profile,
        segments=tuple(
            _compiled(segment) if _is_compiled(segment, profile, plan) else segment
            for segment in profile.segments
        ),
    )


def _compiled(segment: Segment) -> Segment:
    """Return a segment in compiled form.

    Each remaining operator keeps at most one tensor for backward.
    """
    forward = _fused(segment.forward)
    return replace(
        segment,
        forward=forward,
        backward=_fused(segment.backward),
        again=None,
        kept_tensors=min(segment.kept_tensors, round(forward.operators)),
    )


def start_s(profile: Profile, plan: Plan) -> float:
    """Return the seconds of compiling with an empty cache.

    Blocks that do the same work are compiled once. Ranks compile one after the other, and all but
    the first find the code in the cache.
    """
    kinds = {
        _kind(segment): segment.forward.fused.kernels + segment.backward.fused.kernels
        for segment in profile.segments
        if _is_compiled(segment, profile, plan)
    }
    return FIRST_S + KERNEL_S * sum(kinds.values())


def _is_compiled(segment: Segment, profile: Profile, plan: Plan) -> bool:
    """Whether a segment is compiled.

    A model without units is compiled whole. If a model is split, every piece is compiled, even a
    single recurrent layer.
    """
    return (bool(segment.unit) or not profile.units) and (
        plan.splits_model or segment.unit not in profile.recurrent
    )


def _kind(segment: Segment) -> tuple[object, ...]:
    """Return a key that is equal for equal segments."""
    return segment.forward, segment.backward, segment.kept_bytes, segment.output_bytes


def _fused(work: Work) -> Work:
    """Return work with fused operators.

    Arithmetic takes as long as before. Tensors between fused operators are neither written nor
    read. This traffic includes that between functions, so that `moved_bytes` may fall below zero.
    """
    if work.fused == Fused():
        return work
    spared, moved = work.fused.spared_bytes, work.moved_bytes
    return replace(
        work,
        operators=work.operators - work.fused.spared_operators,
        fused=Fused(),
        spared=work.fused,
        moved_bytes=Affine(moved.fixed - spared.fixed, moved.per_sample - spared.per_sample),
    )
