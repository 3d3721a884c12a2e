"""Devices and hosts of devices as values."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paceline.base.errors import ClusterError
from paceline.cluster.catalogue import Accelerator, LinkKind, named_by_driver
from paceline.cluster.catalogue import accelerator as known_accelerator
from paceline.cluster.catalogue import assumed as assumed_accelerator
from paceline.cluster.links import Link, Network

if TYPE_CHECKING:
    from paceline.job import Precision


DeviceKind = Literal["cpu", "cuda"]


# What a core of an ordinary CPU multiplies in float32 (90 GFLOP/s) for what it moves (8 GB/s). Measured on 2 cores with
# AVX-512, one thread each.
CPU_FLOPS_PER_BYTE = 90 / 8


@dataclass(frozen=True, slots=True)
class Device:
    """One place where a rank can run.

    memory_bytes: What one rank may use. Of a CPU rank: by how much its resident size may grow once it has started.
    is_limit: Whether the user said so, and a rank that needs more is stopped; else it is what the device has.
    flops_per_s: Matrix products in float32 with one rank's share of the cores, all ranks busy; None if not known. What
        a described device does in other precisions is its accelerator's.
    memory_bytes_per_s: Streaming bandwidth of one rank; None if not known.
    accelerator: What it is, of a device that is described and need not be here.
    context_bytes: What a process takes of a GPU that is here beside what torch's allocator hands out; 0 of other
        devices.
    workspace_bytes: Of cuBLAS on a GPU that is here, which the allocator hands out; 0 of other devices.
    total_bytes: All memory of a GPU of which others hold a part, so that `memory_bytes` is less; None of other devices.
    holders: Who they are, as far as the driver says.
    num_sharing: Ranks that have this GPU together. Each may use its part of the memory.
    """

    kind: DeviceKind
    index: int
    memory_bytes: int
    name: str = ""
    flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    is_limit: bool = False
    accelerator: Accelerator | None = None
    context_bytes: int = 0
    workspace_bytes: int = 0
    total_bytes: int | None = None
    holders: tuple[str, ...] = ()
    num_sharing: int = 1

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    def flops_per_byte(self, precision: Precision) -> float:
        """FLOPs of matrix products that the device does in the time in which it reads or writes a byte.

        A CPU counts as an ordinary one unless it states both figures, for ranks on several hosts have to come to the
        same answer; a GPU that the catalogue does not list counts as an A100.
        """
        if self.kind == "cpu":
            stated = self.flops_per_s and self.memory_bytes_per_s
            return self.flops_per_s / self.memory_bytes_per_s if stated else CPU_FLOPS_PER_BYTE  # type: ignore[operator]
        accelerator = self.accelerator or named_by_driver(self.name) or known_accelerator("A100")
        return (
            accelerator.product_flops_per_s(precision)
            * accelerator.product_reached
            / accelerator.memory_bytes_per_s
        )

    @property
    def taken(self) -> str:
        """Why there is less memory than the device has; empty where there isn't."""
        if self.total_bytes is None:
            return ""
        holders = "; ".join(self.holders) or "processes the driver doesn't name"
        return (
            f"{self} has {self.memory_bytes / 2**30:.1f} GiB free of {self.total_bytes / 2**30:.1f}: "
            f"the rest is held by {holders}"
        )


@dataclass(frozen=True, slots=True)
class Nodes:
    """Some nodes that are alike. devices: of one of them. price_per_hour: of one device; None if nobody says."""

    count: int
    devices: tuple[Device, ...]
    network: Network
    price_per_hour: float | None = None

    @property
    def num_devices(self) -> int:
        return self.count * len(self.devices)


def link_of(kind: LinkKind) -> Link:
    """A link of the catalogue, as fast as collectives find it."""
    return Link(kind.bytes_per_s * kind.reached, kind.latency_s)


def described(accelerator: Accelerator, *, memory_bytes: int | None = None) -> Device:
    """A device that need not be here."""
    return Device(
        "cuda",
        0,
        memory_bytes or accelerator.memory_bytes,
        name=accelerator.name,
        flops_per_s=accelerator.float32_flops_per_s * accelerator.product_reached,
        memory_bytes_per_s=accelerator.memory_bytes_per_s,
        accelerator=accelerator,
    )


def _of_memory(text: str) -> Accelerator | None:
    """A GPU of which only the memory is said, such as "24GB"; None for a name. 24 GiB are 24 GB, as makers have it."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:GB|GiB)", text, re.IGNORECASE)
    if size is None:
        return None
    gib = float(size[1])
    if gib < 1:
        raise ClusterError(
            f"a GPU of {text} has less than 1 GiB", hint="2x24GB is two GPUs of 24 GiB each"
        )
    like = assumed_accelerator(int(gib * 2**30))
    return replace(
        like,
        name=f"{gib:g}GB",
        memory_bytes=int(gib * 2**30),
        aliases=(),
        assumed=like.name,
        source=f"assumed to be as fast as {like.name}: {like.source}",
    )


_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
}


def size_bytes(text: str) -> int:
    """
    >>> size_bytes("1.5GiB")
    1610612736
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text)
    unit = next((unit for unit in _UNITS if match and unit.lower() == match[2].lower()), None)
    if match is None or unit is None or float(match[1]) * _UNITS[unit] < 1:
        raise ClusterError(
            f"can't read the size '{text}'",
            hint="a number above 0 and a unit, such as 512MiB; units "
            f"are {', '.join(filter(None, _UNITS))}",
        )
    return int(float(match[1]) * _UNITS[unit])
