"""The cost side of the rooms: what each strategy adds to a step, as events at the moments of the step.

A step is the same for every plan; its moments are, in order:

    start                                              what is held before the step
    for every micro-batch:
        begin
        before_forward, forward, after_forward         for every segment
        turn                                           the loss is there
        before_backward, backward, after_backward      for every segment, the last one first
        done
    finish                                             every gradient is the whole window's
    meet                                               ranks agree on the loss
    update                                             clipping and the optimizer
    save                                               a checkpoint's snapshot; no part of the step's time

`enter` is called once a step and answers with what the room does at which moment. Rooms stand inside one another
as on the running side: at a `before_...` moment the outermost comes first, at all others the innermost. The
innermost of all is the work of one device (`planner/program.py`).

Segments that follow each other alike (`Segment.repeat`) are the first, some between that are played as one, and the
last; a moment says which it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from paceline.cluster.devices import Device, DeviceKind
from paceline.cluster.software import PACELINE, Software
from paceline.model.cost.op_calls import OperatorCalls
from paceline.model.cost.profile import Product, Profile, Segment, Work
from paceline.simulate.allocator import ROUNDED_BYTES, ROUNDED_PART, Allocator, CpuHeap, CudaCaching
from paceline.simulate.identity_cache import KeptByIdentity
from paceline.simulate.program import COMPUTE, Collective, CollectiveName, Compute, Event, Part
from paceline.strategies.plan import Plan
from paceline.strategies.shared_barrier import SLOT_BYTES

# NCCL keeps buffers for each channel of each connection that
# it receives on: 4 MiB for large messages, and 0.5 and 4.7 MiB for its two protocols of small ones (DEFAULT_BUFFSIZE,
# DEFAULT_LL_BUFFSIZE and DEFAULT_LL128_BUFFSIZE in NCCL's src/init.cc). A communicator of one node has at most some 24
# channels, over NVLink; fewer over PCIe, where this is too much ("linearly tied to the number of channels",
# NVIDIA/nccl#986).
NCCL_CONNECTION_BYTES = 24 * (4 * 2**20 + 512 * 2**10 + 4800 * 2**10)

ADDED = 3  # bytes moved a byte of gradient that is added to another: both are read, one is written

MomentName = Literal[
    "start",
    "begin",
    "before_forward",
    "forward",
    "after_forward",
    "turn",
    "before_backward",
    "backward",
    "after_backward",
    "done",
    "finish",
    "meet",
    "update",
    "save",
]


def allocator_of(plan: Plan, device: Device, software: Software = PACELINE) -> Allocator:
    """What hands out memory to a rank of the plan on a device, which may be here or described."""
    if device.kind == "cpu":
        return CpuHeap(gives_back=device.is_limit)
    if device.accelerator is not None:
        return CudaCaching(round(software.context_bytes), rounded_part=software.reserved - 1)
    if not device.context_bytes:
        return CudaCaching()
    return CudaCaching(
        device.context_bytes,
        _nccl_connections(plan) * NCCL_CONNECTION_BYTES,
        device.workspace_bytes,
        ROUNDED_PART,
        ROUNDED_BYTES,
    )


def _nccl_connections(plan: Plan) -> int:
    """On which a rank receives: two in every group that sums or gathers, for a ring and a tree, and one from each
    neighbour of a pipeline or of placed parts. Servers and their workers talk over sockets."""
    sizes = plan.axes.sizes()
    if math.prod(sizes.values()) == 1:
        return 0
    in_a_chain = plan.axes.num_ranks(lambda axis: axis.cuts_modules)
    groups = {
        axis.name
        for axis in plan.axes.facts()
        if not axis.cuts_modules and 1 < sizes[axis.name] < plan.world_size
    } | {"all"}
    return 2 * len(groups) + min(2, in_a_chain - 1)


def small_all_reduce(
    step: Step, num_bytes: float, group: int, *, name: str = "", stride: int = 1
) -> Collective:
    """Of figures, counts and marks, as `host_all_reduce.py` does it."""
    return Collective(
        "all_reduce",
        num_bytes,
        group,
        name=name,
        stream=COMPUTE,
        stride=stride,
        is_small=step.device_kind == "cpu" and num_bytes <= SLOT_BYTES,
    )


@dataclass(frozen=True, slots=True)
class HookPoint:
    """Which micro-batch and which segment (a number in the profile) a moment belongs to; 0 where there is none.

    is_first, is_last: of the segment's repetitions, in the order of the forward pass.
    """

    microbatch: int = 0
    segment: int = 0
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a rank holds of each parameter between its uses, by name.

    gradients_by_unit: whether a gradient is ready only when its whole unit's backward is done.
    gradients_kept: whether their memory is kept from step to step.
    """

    parameters: Mapping[str, int]
    gradients: Mapping[str, int]
    state: Mapping[str, int]
    gradients_by_unit: bool = False
    gradients_kept: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What a room needs to know about one rank's step.

    microbatch_samples: this rank's, of each micro-batch.
    software: the program that trains.
    """

    profile: Profile
    plan: Plan
    device_kind: DeviceKind
    microbatch_samples: tuple[float, ...]
    footprint: Footprint
    software: Software = PACELINE

    def is_last(self, point: HookPoint) -> bool:
        """Whether this is the window's last micro-batch."""
        return point.microbatch == len(self.microbatch_samples) - 1

    def total(self, bytes_by_name: Mapping[str, int]) -> int:
        """Of all parameters, with all there are of each."""
        return sum(bytes_by_name[p.name] * p.count for p in self.profile.parameters)

    def segment(self, point: HookPoint) -> Segment:
        return self.profile.segments[point.segment]

    def samples(self, point: HookPoint) -> float:
        return self.microbatch_samples[point.microbatch]


def forward_moments(
    microbatch: int, segment: int, repeat: int
) -> Iterator[tuple[MomentName, HookPoint]]:
    """Of a segment and those like it: the first, one for all between, the last."""
    for is_first, is_last in _ENDS[min(repeat, 3)]:
        point = HookPoint(microbatch, segment, is_first, is_last)
        yield "before_forward", point
        yield "forward", point
        yield "after_forward", point


def backward_moments(
    microbatch: int, segment: int, repeat: int
) -> Iterator[tuple[MomentName, HookPoint]]:
    """The same, the last one first."""
    for is_first, is_last in reversed(_ENDS[min(repeat, 3)]):
        point = HookPoint(microbatch, segment, is_first, is_last)
        yield "before_backward", point
        yield "backward", point
        yield "after_backward", point


_ENDS = {
    1: [(True, True)],
    2: [(True, False), (False, True)],
    3: [(True, False), (False, False), (False, True)],
}


def compute(work: Work, samples: float, *, part: Part = "compute") -> Compute:
    """A segment's work on so many samples, as an event."""
    return Compute(
        flops=work.flops.at(samples),
        moved_bytes=work.moved_bytes.at(samples),
        function_bytes=work.function_bytes.at(samples),
        operators=work.operators,
        part=part,
        products=_of_samples(work.products, samples) if work.products else (),
        calls=_calls_of_samples(work.calls, samples) if work.calls.first else (),
        is_compiled=work.spared.kernels > 0,
        spared_bytes=work.spared.spared_bytes.at(samples),
        spared_operators=work.spared.spared_operators,
    )


def _grow(products: tuple[Product, ...], samples: float) -> tuple[Product, ...]:
    sides = [{p.grows: getattr(p, p.grows) * samples} for p in products]
    return tuple(replace(p, **side) for p, side in zip(products, sides, strict=True))


def reduce_scatter_on(kind: DeviceKind) -> CollectiveName:
    """What a reduce-scatter is on a kind of device. gloo copies the whole tensor, sums all of it on every rank, and
    each keeps its part.

    Source: `reduce_scatter_tensor_coalesced` in torch's ProcessGroupGloo.cpp; on two ranks of torch 2.13 it sends as
    many bytes as an all-reduce, and a gathering half of them.
    """
    return "all_reduce" if kind == "cpu" else "reduce_scatter"


_of_samples = KeptByIdentity(_grow)
_calls_of_samples = KeptByIdentity(OperatorCalls.at)


Hook = Callable[[HookPoint], Iterable[Event]]
Hooks = Mapping[MomentName, Hook]


def unchanged(footprint: Footprint, plan: Plan, profile: Profile) -> Footprint:
    """A room that leaves to each rank what it held."""
    return footprint


def whole(profile: Profile, plan: Plan, software: Software) -> Profile:
    """A room in which each rank runs every operator whole."""
    return profile


def at_once(profile: Profile, plan: Plan) -> float:
    """A room with which a run starts as soon as without it."""
    return 0.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost side of a strategy.

    enter: the room's events by moment.
    hold: what a rank holds of what it held without the room.
    narrow: what a rank computes of what it computed without the room; done before anything is held or played.
    start_s: seconds that a run takes once, before or in its first steps, for the room.
    """

    enter: Callable[[Step], Hooks]
    hold: Callable[[Footprint, Plan, Profile], Footprint] = unchanged
    narrow: Callable[[Profile, Plan, Software], Profile] = whole
    start_s: Callable[[Profile, Plan], float] = at_once
