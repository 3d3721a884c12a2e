"""The cost side of strategies: the events that each strategy adds to a step, at its hook points.

A step has the same moments for every plan. In order, they are:

    start                                              memory is held before the step
    for every micro-batch:
        begin
        before_forward, forward, after_forward         for every segment
        turn                                           the loss is known
        before_backward, backward, after_backward      for every segment, the last one first
        done
    finish                                             every gradient covers the whole window
    meet                                               ranks agree on the loss
    update                                             clipping and the optimizer
    save                                               a checkpoint's snapshot; not timed

`CostModel.enter` is called once a step and returns the strategy's events by moment. Strategies are
nested as on the running side: at a `before_...` moment the outermost strategy comes first, at all
other moments the innermost. The innermost of all is the work of one device (`planner/program.py`).

A row of equal segments (`Segment.repeat`) is simulated as the first one, all between as one, and
the last one. A hook point says which of them it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from paceline.cluster.devices import Device, DeviceKind
from paceline.cluster.software import PACELINE, Software
from paceline.model.cost.profile import Product, Profile, Segment, Work
from paceline.simulate.allocator import ROUNDED_BYTES, ROUNDED_PART, Allocator, CpuHeap, CudaCaching
from paceline.simulate.identity_cache import IdentityCache
from paceline.simulate.program import COMPUTE, Collective, Compute, Event, Part
from paceline.strategies.plan import Plan

# NCCL keeps buffers for each channel of each connection on which a rank receives: 4 MiB for large
# messages, and 0.5 and 4.7 MiB for its two protocols of small messages (DEFAULT_BUFFSIZE,
# DEFAULT_LL_BUFFSIZE and DEFAULT_LL128_BUFFSIZE in NCCL's src/init.cc). A communicator of one node
# has at most some 24 channels, over NVLink. It has fewer over PCIe, where this figure is too high
# ("linearly tied to the number of channels", NVIDIA/nccl#986).
NCCL_CONNECTION_BYTES = 24 * (4 * 2**20 + 512 * 2**10 + 4800 * 2**10)

# Bytes moved per byte of a gradient that is added to another: both are read, one is written.
ADDED = 3

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
    """Return the allocator of a rank of the plan on a device, of this machine or described."""
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
    """Return the number of NCCL connections on which a rank receives.

    A rank has two in every group that sums or gathers, for a ring and a tree, and one from each
    neighbour of a pipeline or of placed parts. Servers and their workers communicate over sockets.
    """
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
    num_bytes: float, group: int, *, name: str = "", stride: int = 1
) -> Collective:
    """Return the all-reduce of figures, counts and marks."""
    return Collective(
        "all_reduce",
        num_bytes,
        group,
        name=name,
        stream=COMPUTE,
        stride=stride,
    )


@dataclass(frozen=True, slots=True)
class HookPoint:
    """The micro-batch and the segment that a moment belongs to; 0 where there is none."""

    microbatch: int = 0
    segment: int = 0  # number in the profile
    # Whether this is the first or last of the segment's repetitions, in the order of the forward.
    is_first: bool = True
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a rank holds of each parameter between its uses, by name."""

    parameters: Mapping[str, int]
    gradients: Mapping[str, int]
    state: Mapping[str, int]  # of the optimizer
    gradients_by_unit: bool = False  # whether a gradient is ready only after its unit's backward
    gradients_kept: bool = False  # whether gradients keep their memory from step to step


@dataclass(frozen=True, slots=True)
class Step:
    """The facts of one rank's step that a cost model needs."""

    profile: Profile
    plan: Plan
    device_kind: DeviceKind
    microbatch_samples: tuple[float, ...]  # this rank's samples of each micro-batch
    footprint: Footprint
    software: Software = PACELINE  # the program that trains

    def is_last(self, point: HookPoint) -> bool:
        """Whether this is the window's last micro-batch."""
        return point.microbatch == len(self.microbatch_samples) - 1

    def total(self, bytes_by_name: Mapping[str, int]) -> int:
        """Return the sum over all parameters, each counted as often as the model has it."""
        return sum(bytes_by_name[p.name] * p.count for p in self.profile.parameters)

    def segment(self, point: HookPoint) -> Segment:
        return self.profile.segments[point.segment]

    def samples(self, point: HookPoint) -> float:
        return self.microbatch_samples[point.microbatch]


FORWARD: tuple[MomentName, ...] = ("before_forward", "forward", "after_forward")
BACKWARD: tuple[MomentName, ...] = ("before_backward", "backward", "after_backward")


def moments(
    names: tuple[MomentName, ...], microbatch: int, segment: int, repeat: int
) -> Iterator[tuple[MomentName, HookPoint]]:
    """Yield the moments FORWARD or BACKWARD of a row of equal segments: the first, one for all
    between, the last; in backward, the last one first."""
    for is_first, is_last in _ENDS[min(repeat, 3)][:: 1 if names is FORWARD else -1]:
        point = HookPoint(microbatch, segment, is_first, is_last)
        yield from ((name, point) for name in names)


_ENDS = {
    1: [(True, True)],
    2: [(True, False), (False, True)],
    3: [(True, False), (False, False), (False, True)],
}


def compute(work: Work, samples: float, *, part: Part = "compute") -> Compute:
    """Return a segment's work on `samples` samples as an event."""
    return Compute(
        flops=work.flops.at(samples),
        moved_bytes=work.moved_bytes.at(samples),
        function_bytes=work.function_bytes.at(samples),
        operators=work.operators,
        part=part,
        products=_of_samples(work.products, samples) if work.products else (),
        is_compiled=work.spared.kernels > 0,
    )


def _grow(products: tuple[Product, ...], samples: float) -> tuple[Product, ...]:
    sides = [{p.grows: getattr(p, p.grows) * samples} for p in products]
    return tuple(replace(p, **side) for p, side in zip(products, sides, strict=True))


_of_samples = IdentityCache(_grow)


Hook = Callable[[HookPoint], Iterable[Event]]
Hooks = Mapping[MomentName, Hook]


def at_once(profile: Profile, plan: Plan) -> float:
    """Return 0.0, for a strategy that does not delay the start of a run."""
    return 0.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost side of a strategy."""

    # Returns the strategy's events by moment.
    enter: Callable[[Step], Hooks] = lambda step: {}
    # Returns what a rank holds under the strategy, from what it holds without it.
    hold: Callable[[Footprint, Plan, Profile], Footprint] = lambda footprint, plan, profile: (
        footprint
    )
    # Returns what a rank computes under the strategy, from what it computes without it. Runs before
    # `hold` and before the simulation.
    narrow: Callable[[Profile, Plan, Software], Profile] = lambda profile, plan, software: profile
    # Returns the seconds that the strategy takes once a run, before or in the first steps.
    start_s: Callable[[Profile, Plan], float] = at_once
    # Returns the memory of ranks that compute no gradients: by the ranks' name, bytes by ledger
    # entry.
    ranks_apart: Callable[[Profile, Plan], Mapping[str, Mapping[str, int]]] = lambda profile, plan: {}
