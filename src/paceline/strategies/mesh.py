"""The mesh of a plan's ranks: which ranks share an axis, and what they have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

from paceline.strategies.axes import AXES, Axis

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.cluster.devices import Device
    from paceline.strategies.plan import Plan


@dataclass(frozen=True)
class Mesh:
    """This rank's place among all ranks of a plan.

    >>> Mesh({"data": 2, "shard": 2}, rank=3).coordinates
    {'data': 1, 'shard': 1}
    """

    # Ranks along each axis, outermost axis first. Ranks with successive numbers are neighbours
    # along the last axis.
    sizes: dict[str, int]
    rank: int
    # what each axis cuts; an axis that is not in `sizes` has one rank
    axes: tuple[Axis, ...] = AXES
    _groups: dict[str, ProcessGroup] = field(default_factory=dict, compare=False)
    _devices: dict[str, DeviceMesh] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Mesh:
        """Return a rank's place in a plan."""
        return cls(plan.axes.sizes(), rank, plan.axes.facts())

    def at(self, rank: int) -> Mesh:
        """Return another rank's place, without process groups."""
        return Mesh(self.sizes, rank, self.axes)

    @cached_property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @cached_property
    def coordinates(self) -> dict[str, int]:
        places, rest = {}, self.rank
        for axis, size in reversed(self.sizes.items()):
            rest, places[axis] = divmod(rest, size)
        return {axis: places[axis] for axis in self.sizes}

    def ranks_along(self, axis: str) -> list[int]:
        """Return the ranks that differ from this one in this axis only, in order."""
        return self.ranks_over([axis])

    @cached_property
    def stage_axis(self) -> str:
        """The axis along which ranks hold different modules.

        If the plan has several ranks along none, this is the first axis that cuts modules.
        """
        cutting = self._names(lambda axis: axis.cuts_modules)
        return next((axis for axis in cutting if self.sizes[axis] > 1), cutting[0])

    @cached_property
    def stage_word(self) -> str:
        """The word that messages use for one place along the axis of stages."""
        return next(axis.place for axis in self.axes if axis.name == self.stage_axis)

    @cached_property
    def part_axes(self) -> tuple[str, ...]:
        """Axes along which ranks hold parts of tensors, outermost first."""
        return self._names(lambda axis: axis.cuts_weights)

    @cached_property
    def cut_by(self) -> list[tuple[str, ...]]:
        """All sets of axes that may cut one tensor: none, each axis, each two axes, and so on.

        The order is the same on all ranks.
        """
        axes = self.part_axes
        return [cutting for count in range(len(axes) + 1) for cutting in combinations(axes, count)]

    @cached_property
    def copy_axes(self) -> tuple[str, ...]:
        """Axes along which all ranks hold the same weights."""
        return self._names(lambda axis: axis.copies_weights)

    @cached_property
    def alike_axes(self) -> tuple[str, ...]:
        """Axes along which all ranks hold an uncut tensor: all axes except those that cut
        modules."""
        return self._names(lambda axis: not axis.cuts_modules)

    @cached_property
    def holds_parts(self) -> bool:
        """Whether ranks hold parts of tensors, or different modules."""
        return any(self.sizes[axis] > 1 for axis in self.sizes if axis not in self.copy_axes)

    @cached_property
    def replicas(self) -> list[int]:
        """Ranks that hold the same part of the model and see another part of the batch, in their
        order."""
        return self.ranks_over(self.summed_axes())

    def summed_axes(self, cut_by: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the axes over which the gradient of a tensor is summed.

        cut_by: the axes that cut the tensor; see `axes_cut`.

        >>> Mesh({"data": 2, "shard": 2, "tensor": 2}, rank=0).summed_axes(["shard"])
        ('data',)
        """
        return tuple(
            name for name in self._names(lambda axis: axis.cuts_batch) if name not in cut_by
        )

    def ranks_over(self, axes: Iterable[str]) -> list[int]:
        """Return the ranks that differ from this one in these axes only, in order, the first axis
        outermost."""
        axes = list(axes)
        ranks = [self.rank - sum(self.coordinates[axis] * self._stride(axis) for axis in axes)]
        for axis in axes:
            ranks = [
                rank + place * self._stride(axis)
                for rank in ranks
                for place in range(self.sizes[axis])
            ]
        return ranks

    @cached_property
    def replica(self) -> int:
        """The number of this rank's replica.

        Replicas are numbered along the axes that cut samples.
        """
        return self.number(self._names(lambda axis: axis.cuts_samples))

    @cached_property
    def copy(self) -> int:
        """The number of the copy of the model's weights that this rank holds, whole or in part."""
        return self.number(self.copy_axes)

    @cached_property
    def part(self) -> int:
        """The number of the part of the model's weights that this rank holds.

        Ranks with the same number hold the same weights.
        """
        return self.number(axis for axis in self.sizes if axis not in self.copy_axes)

    @cached_property
    def num_copies(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.copy_axes)

    @cached_property
    def loss_number(self) -> int:
        """This rank's number among ranks that compute different losses.

        Ranks with the same samples and modules have the same number, and draw the same random
        numbers.
        """
        return self.number(self._names(lambda axis: not axis.computes_same_loss))

    @cached_property
    def is_first_of_same_loss(self) -> bool:
        """Whether this rank is the first of those that compute the same output, and represents
        them."""
        return self.is_first(self._names(lambda axis: axis.computes_same_loss))

    @cached_property
    def is_first_of_same_samples(self) -> bool:
        """Whether this rank is the first of those that see the same samples, and represents
        them."""
        return self.is_first(self._names(lambda axis: not axis.cuts_samples))

    def is_first(self, axes: Iterable[str]) -> bool:
        """Whether this rank is the first along all of these axes."""
        return not any(self.coordinates[axis] for axis in axes)

    def group(self, axis: str) -> ProcessGroup:
        """Return the process group along an axis, or that of all "replicas".

        Call `connect` before.
        """
        return self._groups[axis]

    def connect(self) -> None:
        """Make the process group of every axis with more than one rank.

        Collective: every rank calls it.
        """
        import torch.distributed as dist

        made: dict[tuple[str, ...], Any] = {}
        for name, axes in {
            **{axis: (axis,) for axis in self.sizes},
            "replicas": self.summed_axes(),
        }.items():
            along = tuple(axis for axis in axes if self.sizes[axis] > 1)
            if along and along not in made:
                is_whole = len(self.ranks_over(along)) == self.world_size
                made[along] = dist.group.WORLD if is_whole else self.new_group(along)
            if along:
                self._groups[name] = made[along]

    def new_group(
        self, axes: Sequence[str], places: Sequence[int] | None = None, **options: Any
    ) -> ProcessGroup | None:
        """Make a process group of this rank and those that differ from it in these axes only.

        Collective: every rank makes the groups of all rows, in one order.

        Args:
            places: The places of a row that are in its group; by default all. A rank that has no
                such place gets None.
            options: See `torch.distributed.new_group`.
        """
        import torch.distributed as dist

        own = None
        for first in range(self.world_size):
            row = self.at(first).ranks_over(axes)
            if row[0] == first:
                members = row if places is None else [row[place] for place in places]
                group = dist.new_group(members, **options)
                own = group if self.rank in members else own
        return own

    def devices(self, kind: str) -> DeviceMesh:
        """Return torch's mesh of all ranks, with the axes of more than one rank as its dims.

        It uses the groups that `connect` has made. New groups would have threads and connections of
        their own.
        """
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        if kind not in self._devices:
            sizes = {axis: size for axis, size in self.sizes.items() if size > 1}
            self._devices[kind] = DeviceMesh.from_group(
                [self.group(axis) for axis in sizes],
                kind,
                torch.arange(self.world_size).view(*sizes.values()),
                mesh_dim_names=tuple(sizes),
            )
        return self._devices[kind]

    def _names(self, has: Callable[[Axis], bool]) -> tuple[str, ...]:
        """Return the names of the axes for which a predicate holds, outermost first."""
        facts = {axis.name: axis for axis in self.axes}
        return tuple(name for name in self.sizes if has(facts[name]))

    def number(self, axes: Iterable[str]) -> int:
        """Return this rank's number along several axes together, the first of them outermost."""
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + self.coordinates[axis]
        return number

    def _stride(self, axis: str) -> int:
        after = list(self.sizes)[list(self.sizes).index(axis) + 1 :]
        return math.prod(self.sizes[name] for name in after)


def hosts_of_parts(mesh: Mesh, host_ranks: int) -> dict[int, set[int]]:
    """Return the hosts that hold each part of the model's weights, by part.

    Each host has `host_ranks` ranks.
    """
    hosts: dict[int, set[int]] = {}
    for rank in range(mesh.world_size):
        hosts.setdefault(mesh.at(rank).part, set()).add(rank // host_ranks)
    return hosts


def weakest(plan: Plan, devices: Sequence[Device]) -> list[Device | None]:
    """Return the device with the least memory for each place along the axis of stages.

    All replicas are cut alike, so the smallest device decides.
    """
    mesh = Mesh.of(plan, 0)
    axis = mesh.stage_axis
    weakest_at: list[Device | None] = [None] * mesh.sizes[axis]
    for rank, device in enumerate(devices):
        place = mesh.at(rank).coordinates[axis]
        known = weakest_at[place]
        if known is None or device.memory_bytes < known.memory_bytes:
            weakest_at[place] = device
    return weakest_at


def axes_cut(tensor: Any) -> tuple[str, ...]:
    """Return the axes along which ranks hold different parts of a tensor, outermost first.

    A plain tensor has none.
    """
    if not hasattr(tensor, "device_mesh"):
        return ()
    return tuple(
        axis
        for axis, placement in zip(
            tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True
        )
        if not placement.is_replicate()
    )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds; the tensor itself if it is not
    distributed."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def let_go_of(parameter: torch.nn.Parameter) -> None:
    """Free the memory of a parameter that is no longer used.

    Other code may still refer to it, as Keras models do. It then sees one element, expanded to the
    parameter's shape.
    """
    parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)


def is_about_parts(error: Exception) -> bool:
    """Whether torch failed because a rank holds a part of a tensor."""
    return any(
        words in str(error) for words in ("DTensor", "sharding strategy", "Sharding propagation")
    )
