"""The cost of a tensor axis: each rank has a part of every layer's products, and layers exchange
activations.

A layer has two exchanges in forward and two in backward. Each is an all-reduce of the layer's
output or, if activations between layers are cut along the sequence, an all-gather and a
reduce-scatter of the same bytes. Computing waits for them. Paceline cuts large activations and
keeps inputs of products whole (`run.py`). The price assumes that the sequence divides. Sources:
Shoeybi et al. 2019 (Megatron-LM); Korthikanti et al. 2022 (sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from paceline.cluster.software import Software
from paceline.model.cost.profile import (
    Affine,
    Core,
    Parameter,
    Product,
    Profile,
    Segment,
    TensorCut,
    Work,
)
from paceline.simulate.allocator import holes_of_exchanged
from paceline.simulate.program import COMPUTE, Collective, CollectiveName, Event
from paceline.strategies.costs import HookPoint, Hooks, Step
from paceline.strategies.plan import Plan

# Part of the undivided tensors kept by a layer that are inputs of products: the results of two
# norms. The rest are the inputs of the norms. Inputs of products are gathered for products by
# columns.
GATHERED = 0.5


def narrow(profile: Profile, plan: Plan, software: Software) -> Profile:
    """Return one rank's part of the profile.

    If the cut of a segment is unknown, every rank runs it whole.
    """
    return _part(
        profile,
        plan.axes.tensor,
        0.0 if software.sequence_parallel else software.cut_sequence_bytes,
        0.0 if software.sequence_parallel else GATHERED,
    )


@lru_cache(maxsize=1024)  # many plans cut a model alike
def _part(profile: Profile, ranks: int, cut_from_bytes: float, kept_whole: float) -> Profile:
    """Return one rank's part of the profile.

    Args:
        cut_from_bytes: The size per sample from which activations between layers are cut.
        kept_whole: The part of kept activations that stays whole even then.
    """
    return replace(
        profile,
        parameters=tuple(_parameter(p, ranks) for p in profile.parameters),
        segments=tuple(_segment(s, ranks, cut_from_bytes, kept_whole) for s in profile.segments),
        update=_update(profile, ranks),
    )


def _parameter(parameter: Parameter, ranks: int) -> Parameter:
    if not parameter.is_cut:
        return parameter
    return replace(
        parameter,
        num_bytes=-(-parameter.num_bytes // ranks),
        rows=max(1, parameter.rows // ranks),
        state_bytes=-(-parameter.state_bytes // ranks),
    )


def _update(profile: Profile, ranks: int) -> Work:
    whole_bytes = sum(p.num_bytes * p.count for p in profile.parameters)
    cut_bytes = sum(p.num_bytes * p.count for p in profile.parameters if p.is_cut)
    part = (whole_bytes - cut_bytes + cut_bytes / ranks) / whole_bytes if whole_bytes else 1.0
    return replace(
        profile.update,
        moved_bytes=profile.update.moved_bytes.times(part),
        function_bytes=profile.update.function_bytes.times(part),
    )


def _segment(segment: Segment, ranks: int, cut_from_bytes: float, kept_whole: float) -> Segment:
    cut = segment.tensor
    if cut is None or cut.counted is not None:
        return segment
    is_cut = segment.output_bytes.per_sample >= cut_from_bytes
    rest = 1 / ranks if is_cut else 1.0
    rest_kept = kept_whole + (1 - kept_whole) / ranks if is_cut else 1.0

    def divided(whole: Affine, part: Affine, rest: float = rest) -> Affine:
        return Affine(
            (whole.fixed - part.fixed) * rest + part.fixed / ranks,
            (whole.per_sample - part.per_sample) * rest + part.per_sample / ranks,
        )

    def work(before: Work, part: Affine) -> Work:
        products = tuple(_product(p, ranks) for p in before.products)
        less = sum(p.flops for p in before.products) - sum(p.flops for p in products)
        return replace(
            before,
            flops=Affine(before.flops.fixed, before.flops.per_sample - less),
            products=products,
            function_bytes=divided(before.function_bytes, part),
        )

    kept = divided(segment.kept_bytes, cut.kept_bytes, rest_kept)
    core = segment.core and Core(
        work(segment.core.forward, segment.core.forward.function_bytes),
        segment.core.kept_bytes.times(1 / ranks),
    )
    again = segment.again and work(
        segment.again,
        cut.forward_bytes.times(
            _ratio(segment.again.function_bytes, segment.forward.function_bytes)
        ),
    )
    peak = _ratio(kept, segment.kept_bytes)
    return replace(
        segment,
        forward=work(segment.forward, cut.forward_bytes),
        backward=work(segment.backward, cut.backward_bytes),
        kept_bytes=kept,
        output_bytes=segment.output_bytes.times(rest),
        core=core,
        again=again,
        forward_peak_bytes=segment.forward_peak_bytes.times(peak),
        backward_peak_bytes=segment.backward_peak_bytes.times(1 / ranks),
    )


def _product(product: Product, ranks: int) -> Product:
    if product.cut is None:
        return product
    sides: dict[str, Any] = {product.cut: getattr(product, product.cut) / ranks}
    return replace(product, **sides)


def _ratio(part: Affine, whole: Affine) -> float:
    return part.per_sample / whole.per_sample if whole.per_sample else 1.0


def enter(step: Step) -> Hooks:
    ranks, shown = step.plan.axes.tensor, 1 - step.software.hidden_exchange

    def sent(kind: CollectiveName, num_bytes: float, times: int) -> Event:
        return Collective(
            kind, num_bytes, ranks, name="exchange", stream=COMPUTE, times=times * shown
        )

    def exchanges(
        cut: TensorCut, samples: float, *, ahead: bool, but_last: bool = False
    ) -> Iterable[Event]:
        if cut.counted is not None:
            counted = cut.counted[0 if ahead else 1]
            for exchange in counted[:-1] if but_last else counted:
                yield sent(exchange.kind, exchange.num_bytes, 1)
        elif (times := (cut.forward_exchanges if ahead else cut.backward_exchanges) - but_last) > 0:
            yield sent("all_reduce", cut.exchanged_bytes.at(samples), times)

    def spares_last(segment: Segment) -> bool:
        return (
            step.software.stops_recomputing
            and segment.again is not None
            and len(segment.again.products) < len(segment.forward.products)
        )

    def after_forward(point: HookPoint) -> Iterable[Event]:
        segment = step.segment(point)
        if (cut := segment.tensor) is not None:
            exchanged = tuple(exchanges(cut, step.samples(point), ahead=True))
            yield from exchanged
            if exchanged and point.microbatch == 0:
                yield from holes_of_exchanged(
                    step.device_kind, segment.kept_bytes.at(step.samples(point))
                )

    def after_backward(point: HookPoint) -> Iterable[Event]:
        """Yield the exchanges of backward.

        Recomputed parts are exchanged again, except for a last product's result.
        """
        segment = step.segment(point)
        if (cut := segment.tensor) is not None:
            yield from exchanges(cut, step.samples(point), ahead=False)
            if step.plan.modifiers.recompute == "full" and segment.unit:
                yield from exchanges(
                    cut, step.samples(point), ahead=True, but_last=spares_last(segment)
                )

    return {"after_forward": after_forward, "after_backward": after_backward}
