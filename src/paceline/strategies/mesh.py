"""Which ranks meet along which axis of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.cluster import Device
    from paceline.plans import Plan


@dataclass(frozen=True)
class Mesh:
    """This rank's place among the ranks: axes with their sizes, outermost first, neighbours in the last one.

    >>> Mesh({"data": 2, "shard": 2}, rank=3).coordinates
    {'data': 1, 'shard': 1}
    """

    sizes: dict[str, int]
    rank: int
    _groups: dict[str, ProcessGroup] = field(default_factory=dict, compare=False)
    _devices: dict[str, DeviceMesh] = field(default_factory=dict, compare=False)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def coordinates(self) -> dict[str, int]:
        found, rest = {}, self.rank
        for axis, size in reversed(self.sizes.items()):
            rest, found[axis] = divmod(rest, size)
        return {axis: found[axis] for axis in self.sizes}

    def ranks_along(self, axis: str) -> list[int]:
        """Ranks that differ from this one in this axis only, in order."""
        stride = self._stride(axis)
        first = self.rank - self.coordinates[axis] * stride
        return [first + i * stride for i in range(self.sizes[axis])]

    def rows(self, axis: str) -> list[list[int]]:
        """All ranks, in rows along an axis."""
        found = [Mesh(self.sizes, first).ranks_along(axis) for first in range(self.world_size)]
        return [row for first, row in enumerate(found) if row[0] == first]

    @property
    def stage_axis(self) -> str:
        """The axis along which ranks hold different modules."""
        return "parts" if self.sizes.get("parts", 1) > 1 else "pipeline"

    @property
    def replicas(self) -> list[int]:
        """Ranks that hold the same part of the model and see other samples: a block along data and shard."""
        apart = self.sizes.get("tensor", 1)
        first = self.rank - self.replica * apart
        return list(range(first, first + self.sizes.get("data", 1) * self.sizes.get("shard", 1) * apart, apart))

    @property
    def replica(self) -> int:
        """Which replica this rank belongs to: replicas are numbered along data, then shard."""
        at = self.coordinates
        return at.get("data", 0) * self.sizes.get("shard", 1) + at.get("shard", 0)

    def group(self, axis: str) -> ProcessGroup:
        """The process group along an axis, or of all "replicas". `connect` must have been called."""
        return self._groups[axis]

    def connect(self) -> None:
        """Make the process group of every axis above 1. Collective: every rank calls it."""
        import torch.distributed as dist

        for axis, size in self.sizes.items():
            if size == self.world_size and size > 1:
                self._groups[axis] = dist.group.WORLD  # type: ignore[assignment]
            elif size > 1:
                for ranks in self.rows(axis):  # every rank makes every group, in one order
                    group = dist.new_group(ranks)
                    if self.rank in ranks:
                        self._groups[axis] = group

        size = len(self.replicas)
        along = next((name for name in ("data", "shard") if self.sizes.get(name, 1) == size > 1), None)
        if along:
            self._groups["replicas"] = self._groups[along]
        elif size == self.world_size > 1:
            self._groups["replicas"] = dist.group.WORLD  # type: ignore[assignment]
        elif size > 1:
            everyone = [Mesh(self.sizes, rank).replicas for rank in range(self.world_size)]
            for ranks in (row for rank, row in enumerate(everyone) if row[0] == rank):
                group = dist.new_group(ranks)
                if self.rank in ranks:
                    self._groups["replicas"] = group

    def devices(self, kind: str) -> DeviceMesh:
        """torch's own mesh of all ranks, with the axes as its dims. Collective when it is first asked for."""
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        if kind not in self._devices:
            ranks = torch.arange(self.world_size).view(*self.sizes.values())
            self._devices[kind] = DeviceMesh(kind, ranks, mesh_dim_names=tuple(self.sizes))
        return self._devices[kind]

    def _stride(self, axis: str) -> int:
        after = list(self.sizes)[list(self.sizes).index(axis) + 1:]
        return math.prod(self.sizes[name] for name in after)


def weakest(plan: Plan, devices: Sequence[Device]) -> list[Device | None]:
    """For each place along the axis of stages the device with the least memory: replicas are cut alike."""
    sizes = plan.axes.sizes()
    axis = Mesh(sizes, 0).stage_axis
    found: list[Device | None] = [None] * sizes[axis]
    for rank, device in enumerate(devices):
        at = Mesh(sizes, rank).coordinates[axis]
        known = found[at]
        if known is None or device.memory_bytes < known.memory_bytes:
            found[at] = device
    return found


def axes_cut(tensor: Any) -> tuple[str, ...]:
    """Axes along which ranks hold different parts of a tensor, outermost first; none of a plain one."""
    if not hasattr(tensor, "device_mesh"):
        return ()
    return tuple(axis for axis, placement in zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True)
                 if not placement.is_replicate())
