"""Cuts a profile of repeated layers into stages, and assigns these to ranks as a run would.

`stages/price.py` cuts captured models. Here the cut takes no time, and equal stages share one
profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from paceline.base.errors import PlanError
from paceline.cluster.software import Software
from paceline.model.cost.profile import Affine, Parameter, Profile, Segment
from paceline.strategies.plan import Plan
from paceline.strategies.stages.cost import RankCost, StageCost, StageMessage
from paceline.strategies.stages.keys import ScheduleName, splits_backward
from paceline.strategies.stages.pipeline import balance
from paceline.strategies.stages.schedule import Action, schedule, stages_of


def deal(num_layers: int, num_stages: int) -> list[int]:
    """Return the number of layers of each stage.

    Layers are divided evenly. Remaining layers go to the middle, because the first and last stages
    also hold the parts before and after the layers. These two stages may have no layers.

    Raises:
        PlanError: there are fewer layers than stages between the first and the last.

    >>> deal(10, 4), deal(126, 128)[:2], deal(126, 128)[-1]
    ([2, 3, 3, 2], [0, 1], 0)
    """
    if num_layers < max(1, num_stages - 2):
        raise PlanError(
            f"a model of {num_layers} layers can't be cut into {num_stages} stages",
            hint=f"at most {num_layers} stages: fewer pipeline ranks, or fewer stages a rank (virtual)",
        )
    each, remaining = divmod(num_layers, num_stages)
    middle = [*range(1, num_stages - 1), 0, num_stages - 1]
    more = set(middle[:remaining])
    return [each + (stage in more) for stage in range(num_stages)]


def ranks(
    profile: Profile,
    plan: Plan,
    software: Software,
    *,
    samples: float,
    flops_per_byte: float,
    most_microbatches: int | None = None,
) -> Iterator[RankCost]:
    """Yield the cost of each rank of the pipeline, from the first.

    Ranks that differ only in their neighbours share a profile.

    Args:
        flops_per_byte: FLOPs that the first rank's device computes in the time of moving a byte.
        most_microbatches: The most micro-batches for which orders are made. Further rounds of a
            schedule repeat.

    Raises:
        PlanError: the model has too few layers.
    """
    num_ranks, virtual = plan.axes.pipeline, plan.schedule.virtual
    runs = _cut(profile, num_ranks * virtual, flops_per_byte)
    count = min(plan.num_microbatches, most_microbatches or plan.num_microbatches)
    orders = orders_of(plan.schedule.schedule, num_ranks, count, virtual)
    boundary_bytes = _boundary_bytes(profile).at(samples)
    if software.cuts_messages or software.sequence_parallel:
        boundary_bytes /= plan.axes.tensor
    homes = _homes(profile, runs, num_ranks)
    batch_bytes = profile.batch_bytes.at(samples * plan.num_microbatches)
    tied_stride = (num_ranks - 1) * (plan.world_size // num_ranks)
    for place in range(num_ranks):
        stages = stages_of(place, num_ranks=num_ranks, virtual=virtual)
        rank_profile, spans = _part(
            profile,
            tuple(runs[stage] for stage in stages),
            halves=2 if splits_backward(plan) else 1,
        )
        tied = [p for p in rank_profile.parameters if len(homes.get(p.name, ())) > 1]
        yield RankCost(
            rank_profile,
            {
                stage: _stage(stage, span, num_ranks, num_ranks * virtual, boundary_bytes)
                for stage, span in zip(stages, spans, strict=True)
            },
            orders[place],
            (samples,) * plan.num_microbatches,
            batch_bytes=batch_bytes,
            tied_bytes=sum(p.gradient_bytes for p in tied) / plan.axes.tensor,
            tied_stride=tied_stride,
        )


@lru_cache(maxsize=256)
def orders_of(
    name: ScheduleName, num_ranks: int, num_microbatches: int, virtual: int
) -> tuple[Sequence[Action], ...]:
    """Return the order of each rank under a schedule. Cached, because many plans share it."""
    return tuple(
        schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, virtual=virtual)
    )


Run = tuple[tuple[int, int], ...]  # (segment, number of its repetitions)


@lru_cache(maxsize=256)
def _cut(profile: Profile, num_stages: int, flops_per_byte: float) -> list[Run]:
    """Return the segments of each stage. Segments of the root stay with the layers next to them."""
    counts = [s.repeat if s.unit else 0 for s in profile.segments]
    dealt = _dealt([s for s in profile.segments if s.unit], num_stages, flops_per_byte)
    cuts: list[list[tuple[int, int]]] = [[] for _ in range(num_stages)]
    stage, room = 0, dealt[0]
    for number, segment in enumerate(profile.segments):
        remaining = segment.repeat
        if not segment.unit:
            after = any(counts[number + 1 :])
            cuts[stage if after else num_stages - 1].append((number, remaining))
            continue
        while remaining:
            while room == 0:
                stage += 1
                room = dealt[stage]
            taken = min(remaining, room)
            cuts[stage].append((number, taken))
            remaining, room = remaining - taken, room - taken
    return [tuple(run) for run in cuts]


def _dealt(layers: Sequence[Segment], num_stages: int, flops_per_byte: float) -> list[int]:
    """Return the number of layers of each stage.

    Equal layers are divided evenly. Others are divided so that the longest stage is as short as
    possible.
    """
    if len(layers) == 1:
        return deal(layers[0].repeat, num_stages)
    flops = [
        s.forward.flops.at(1.0) + s.forward.function_bytes.at(1.0) * flops_per_byte
        for s in layers
        for _ in range(s.repeat)
    ]
    nothing, endless = [0.0] * len(flops), [math.inf] * num_stages
    firsts = balance(
        flops,
        nothing,
        nothing,
        speeds=[1.0] * num_stages,
        memory_bytes=endless,
        in_flight=[1] * num_stages,
    )
    return [end - first for first, end in zip(firsts, [*firsts[1:], len(flops)], strict=True)]


def _homes(profile: Profile, runs: Sequence[Run], num_ranks: int) -> dict[str, set[int]]:
    """Return the ranks that use each parameter of the root, by name."""
    homes: dict[str, set[int]] = {}
    for stage, run in enumerate(runs):
        for number, _ in run:
            segment = profile.segments[number]
            if not segment.unit:
                for name in (*segment.gradients, *segment.borrows):
                    homes.setdefault(name, set()).add(stage % num_ranks)
    return homes


@lru_cache(maxsize=1024)
def _part(profile: Profile, key: tuple[Run, ...], *, halves: int) -> tuple[Profile, list[range]]:
    """Return the profile of a rank with these runs of segments, and the position of each run in
    it."""
    known = {p.name: p for p in profile.parameters}
    parameters: dict[str, Parameter] = {}
    segments: list[Segment] = []
    spans: list[range] = []
    for turn, run in enumerate(key):
        begin = len(segments)
        for number, count in run:
            segment = profile.segments[number]
            mark = f"#{turn}.{number}" if segment.unit else ""
            names = (
                *segment.gradients,
                *(name for name in segment.borrows if name not in parameters),
            )
            for name in names:
                p = known[name]
                parameters[name + mark] = replace(
                    p,
                    name=name + mark,
                    unit=p.unit and p.unit + mark,
                    count=count if segment.unit else p.count,
                )
            segments.append(
                replace(
                    segment,
                    unit=segment.unit and segment.unit + mark,
                    repeat=count,
                    gradients=tuple(name + mark for name in names),
                    backward=segment.backward.times(1 / halves),
                )
            )
        spans.append(range(begin, len(segments)))
    return profile.part(tuple(parameters.values()), tuple(segments)), spans


def _boundary_bytes(profile: Profile) -> Affine:
    """Return the bytes that a stage sends to the next one: the output of a layer."""
    layers: list[Segment] = [s for s in profile.segments if s.unit]
    return max((s.output_bytes for s in layers), key=lambda figure: figure.per_sample)


@lru_cache(maxsize=4096)
def _stage(stage: int, span: range, num_ranks: int, num_stages: int, num_bytes: float) -> StageCost:
    before, after = (stage - 1) % num_ranks, (stage + 1) % num_ranks
    is_first, is_last = stage == 0, stage == num_stages - 1
    return StageCost(
        span,
        takes=() if is_first else (StageMessage(f"x{stage}", before, num_bytes),),
        gives=() if is_last else (StageMessage(f"x{stage + 1}", after, num_bytes),),
        regains=() if is_last else (StageMessage(f"g{stage + 1}", after, num_bytes),),
        returns=() if is_first else (StageMessage(f"g{stage}", before, num_bytes),),
    )
