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


# The float32 products of a core of an ordinary CPU (90 GFLOP/s) for each byte that it moves (8
# GB/s). Measured on 2 cores with AVX-512, one thread each.
CPU_FLOPS_PER_BYTE = 90 / 8


@dataclass(frozen=True, slots=True)
class Device:
    """A device on which a rank can run."""

    kind: DeviceKind
    index: int
    # Memory that one rank may use. For a CPU rank: by how much its resident size may grow once it
    # has started.
    memory_bytes: int
    name: str = ""
    # Matrix products in float32 with one rank's share of the cores, while all ranks are busy; None
    # if not known. A described device's rates in other precisions are those of its accelerator.
    flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None  # streaming bandwidth of one rank; None if not known
    # Whether `memory_bytes` is a limit that the user set, and a rank that needs more is stopped.
    # Otherwise it is the memory that the device has.
    is_limit: bool = False
    accelerator: Accelerator | None = None  # of a described device, which need not be here
    # Memory of a GPU of this machine that a process takes outside torch's allocator; 0 for other
    # devices.
    context_bytes: int = 0
    # Memory of cuBLAS on a GPU of this machine, which torch's allocator holds; 0 for other devices.
    workspace_bytes: int = 0
    # All memory of a GPU, if other processes hold a part of it and `memory_bytes` is less; None
    # otherwise.
    total_bytes: int | None = None
    holders: tuple[str, ...] = ()  # those processes in words, as far as the driver says
    # What torch calls the backend of the ranks' process group, in place of NCCL or shared memory: see
    # `tests/devices/shared_gpu.py`.
    backend: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    def flops_per_byte(self, precision: Precision) -> float:
        """Return the FLOPs of matrix products that the device does in the time in which it reads or
        writes a byte.

        A CPU counts as an ordinary one unless it states both figures, because ranks on several
        hosts must get the same result. A GPU that the catalogue does not list counts as an A100.
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
        """The reason why a rank may use less memory than the device has; empty if it may use
        all.
        """
        if self.total_bytes is None:
            return ""
        holders = "; ".join(self.holders) or "processes the driver doesn't name"
        return (
            f"{self} has {self.memory_bytes / 2**30:.1f} GiB free of {self.total_bytes / 2**30:.1f}: "
            f"the rest is held by {holders}"
        )


@dataclass(frozen=True, slots=True)
class Nodes:
    """A number of equal nodes."""

    count: int
    devices: tuple[Device, ...]  # of one node
    network: Network
    price_per_hour: float | None = None  # of one device; None if it is not known

    @property
    def num_devices(self) -> int:
        return self.count * len(self.devices)


def link_of(kind: LinkKind) -> Link:
    """Return a link of the catalogue with the bandwidth that collectives reach."""
    return Link(kind.bytes_per_s * kind.reached, kind.latency_s)


def described(accelerator: Accelerator, *, memory_bytes: int | None = None) -> Device:
    """Return a device of this kind, which this machine need not have."""
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
    """Return a GPU of which only the memory is given, such as "24GB"; None if the text is a name.

    GB are read as GiB, as makers of GPUs mean them.
    """
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
    """Return the bytes of a size with a unit.

    Raises:
        ClusterError: the size can't be read, or is less than a byte.

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
