"""The values of a plan's keys: axes, synchronisation, schedule and modifiers, with what follows from
them.

`plan.py` adds the text of a plan and the checks of its values. A strategy's `keys.py` reads these
fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from paceline.strategies import extensions
from paceline.strategies.axes import AXES, Axis

ZeroStage = Literal[1, 2, 3]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
RecomputeName = Literal["none", "selective", "full"]
CompileName = Literal["none", "blocks"]
CompressName = Literal["none", "bf16", "int8", "topk", "powersgd"]
AnyPlan = TypeVar("AnyPlan", bound="PlanFields")


@dataclass(frozen=True, slots=True)
class Axes:
    """Sizes of the mesh axes, outermost first. An axis of size 1 is unused."""

    pipeline: int = 1  # ranks that hold consecutive stages of the model
    parts: int = 1  # ranks that hold the modules that a placement assigns to them
    data: int = 1  # replicas that sum their gradients by all-reduce
    shard: int = 1  # replicas that also share optimizer state, gradients and parameters
    tensor: int = 1  # ranks that hold parts of each layer
    # Axes of other packages' strategies with their sizes. They are outside all axes above.
    others: tuple[tuple[str, int], ...] = ()

    def sizes(self) -> dict[str, int]:
        """Return the size of each axis by name, outermost first."""
        return {**dict(self.others), **{axis.name: getattr(self, axis.name) for axis in AXES}}

    def facts(self) -> tuple[Axis, ...]:
        """Return the axes with what each one cuts, outermost first."""
        return (*(extensions.axes()[name] for name, _ in self.others), *AXES)

    def num_ranks(self, has: Callable[[Axis], bool]) -> int:
        """Return the product of the sizes of the axes for which a predicate holds."""
        sizes = self.sizes()
        return math.prod(sizes[axis.name] for axis in self.facts() if has(axis))


class Synchronisation:
    """The interface of all kinds of synchronisation.

    By default, the number of ranks is the product of the axes, and each rank computes gradients.
    """

    __slots__ = ()

    def num_ranks(self, axes: Axes) -> int:
        """Return the number of processes that run the plan."""
        return math.prod(axes.sizes().values())

    def num_replicas(self, axes: Axes) -> int:
        """Return the number of parts of a step's batch: the number of ranks that see different
        samples."""
        return axes.num_ranks(lambda axis: axis.cuts_samples)

    def num_copies(self, axes: Axes) -> int:
        """Return the number of copies of the model's weights on ranks that compute with them."""
        return axes.num_ranks(lambda axis: axis.copies_weights)

    def num_workers(self, axes: Axes) -> int:
        """Return the number of ranks that compute gradients."""
        return self.num_ranks(axes)

    def num_savers(self, axes: Axes) -> int:
        """Return the number of ranks over which the state of a run is divided when it is saved or
        copied."""
        return self.num_ranks(axes)

    @property
    def num_cpu_ranks(self) -> int:
        """The number of first ranks that compute on the CPU even if the others have GPUs."""
        return 0

    def of_forwards(self, plan: AnyPlan) -> AnyPlan:
        """Return the plan for runs without updates."""
        return plan


@dataclass(frozen=True, slots=True)
class AllReduce(Synchronisation):
    """The synchronisation in which every update waits for the gradients of all replicas."""

    # The state that the shard axis splits. 1: optimizer state; 2: also gradients; 3: also
    # parameters.
    zero: ZeroStage = 3


@dataclass(frozen=True, slots=True)
class Schedule:
    """The assignment of the model's modules to ranks, and the order in which these ranks work."""

    # "auto", or a file with the modules of each part; "" for a plan without parts.
    place: str = ""
    schedule: ScheduleName = "1f1b"  # of a pipeline
    virtual: int = 1  # stages that a rank holds; above 1 only for "interleaved"


@dataclass(frozen=True, slots=True)
class Modifiers:
    """Settings that any plan can have."""

    # Number of micro-batches of a replica's part of a step. "auto": as few as fit into each device's
    # memory; twice the number of ranks of a pipeline, for which it is the default.
    microbatches: int | Literal["auto"] = 1
    # "full" keeps only each block's input for backward and recomputes the rest. "selective"
    # recomputes the tensors between attention's products.
    recompute: RecomputeName = "none"
    # "blocks" compiles each repeated block of the model with torch.compile; equal blocks share one
    # compilation.
    compile: CompileName = "none"
    # How the global batch is cut over the replicas: "equal", by the devices' "speed" or "memory",
    # or by one positive whole number per replica.
    shares: Literal["equal", "speed", "memory"] | tuple[int, ...] = "equal"
    # The form in which replicas send each other gradients, or the pseudo-gradients of outer steps.
    compress: CompressName = "none"
    # "yes" for runs that repeat to the bit on the same devices.
    deterministic: Literal["yes", "no"] = "no"


@dataclass(frozen=True, slots=True)
class PlanFields:
    """The values of a plan's keys. See `Plan`, which checks them."""

    axes: Axes = field(default_factory=Axes)
    sync: Synchronisation = field(default_factory=AllReduce)
    schedule: Schedule = field(default_factory=Schedule)
    modifiers: Modifiers = field(default_factory=Modifiers)

    @property
    def world_size(self) -> int:
        """The number of ranks that the plan needs."""
        return self.sync.num_ranks(self.axes)

    @property
    def uses_extensions(self) -> bool:
        """Whether an axis of the plan belongs to a strategy of another package."""
        return bool(self.axes.others)

    @property
    def num_workers(self) -> int:
        """The number of ranks that compute gradients: all ranks except those that are only
        servers."""
        return self.sync.num_workers(self.axes)

    @property
    def num_copies(self) -> int:
        """The number of copies of the model's weights, whole or in parts, on ranks that compute
        with them."""
        return self.sync.num_copies(self.axes)

    @property
    def splits_model(self) -> bool:
        """Whether ranks hold different modules, or parts of layers."""
        return self.axes.num_ranks(lambda axis: not axis.cuts_batch) > 1

    @property
    def model_cut(self) -> tuple[int, ...]:
        """The sizes of the axes that cut the model.

        Plans with equal cuts differ in their replicas at most.
        """
        sizes = self.axes.sizes()
        return tuple(sizes[axis.name] for axis in self.axes.facts() if not axis.cuts_batch)

    @property
    def num_stage_ranks(self) -> int:
        """The number of ranks over which micro-batches are scheduled in stages; 1 without a
        pipeline."""
        return self.axes.pipeline

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule determines the order of a step's micro-batches."""
        return self.num_stage_ranks > 1

    @property
    def num_cpu_ranks(self) -> int:
        """The number of first ranks that use the CPU even if the others have GPUs: they are only
        servers."""
        return self.sync.num_cpu_ranks

    @property
    def replicas(self) -> int:
        """The number of ranks that see different samples."""
        return self.sync.num_replicas(self.axes)

    @property
    def zero(self) -> ZeroStage:
        """The ZeRO stage of the shard axis; see `AllReduce.zero`."""
        return self.sync.zero if isinstance(self.sync, AllReduce) else 3

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a replica's part of a step.

        "auto" must be resolved before.
        """
        count = self.modifiers.microbatches
        assert isinstance(count, int), "'auto' is resolved before ranks start"
        return count
