"""What there is: devices with their memory and speed, and the links between them. It knows no models."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.errors import ClusterError, nearest

DeviceKind = Literal["cpu", "cuda"]

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two devices."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Network:
    """How devices reach each other: in a node, and across nodes.

    Devices are numbered node by node. Along an axis of a mesh a group has neighbours `stride` apart, and all groups of
    the axis talk at the same time.

    inside: between devices of a node. across: one device's share of what its node has; None if there is one node.
    devices_per_node: how many have numbers in a row.
    """

    inside: Link
    across: Link | None = None
    devices_per_node: int = 1

    def in_a_node(self, group: int, stride: int) -> int:
        """How many of a group are in one node."""
        if self.across is None:
            return group
        return max(1, min(group, self.devices_per_node // stride))

    def between(self, rank: int, other: int) -> Link:
        """From one device to another."""
        if self.across is None or rank // self.devices_per_node == other // self.devices_per_node:
            return self.inside
        return self.across


# Two processes over loopback with gloo: 2.4-3.9 GB/s for 25 MB messages, measured on 2 cores; latency of a
# small all-reduce is some 100 us. See docs/prediction.md.
LOOPBACK = Link(bytes_per_s=3e9, latency_s=1e-4)
# NVLink 4, one direction a GPU, at the 71 % an all-gather reaches (public nccl-tests, H100).
NVLINK = Link(bytes_per_s=320e9, latency_s=1e-5)


@dataclass(frozen=True, slots=True)
class Device:
    """One place where a rank can run.

    memory_bytes: What one rank may use. Of a CPU rank: by how much its resident size may grow once it has started.
    is_limit: Whether the user said so, and a rank that needs more is stopped; else it is what the device has.
    flops_per_s: Matrix products in float32 with one rank's share of the cores, all ranks busy; None if not known.
    memory_bytes_per_s: Streaming bandwidth of one rank; None if not known.
    """

    kind: DeviceKind
    index: int
    memory_bytes: int
    name: str = ""
    flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    is_limit: bool = False

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a run, one a rank, in rank order, and the slowest link between them."""

    devices: tuple[Device, ...]
    link: Link = LOOPBACK

    @classmethod
    def local(cls, devices: str | None = None, *, num_ranks: int | None = None, memory: str | None = None) -> Cluster:
        """This machine: its GPUs if it has any, else one CPU device a core (8 at most).

        Args:
            devices: Names such as "cpu:0,cpu:1" or "cuda:0-3", one a rank.
            num_ranks: Ranks to make room for; CPU ranks may outnumber cores, GPU ranks may not outnumber GPUs.
            memory: The limit of each CPU rank, such as "512MiB", or of all in order, "1GiB,2GiB"; by default ranks
                share the machine's memory and none is stopped.

        Raises:
            ClusterError: a device doesn't exist, or a name or a size can't be read.
        """
        gpus = _gpus()
        if devices is not None:
            named = _parse_names(devices)
            for kind, index in named:
                if kind == "cuda" and index >= len(gpus):
                    raise ClusterError(f"there is no cuda:{index}: this machine has {len(gpus)} GPUs",
                                       hint="--devices cpu:0,cpu:1 runs on the CPU")
        elif gpus and (num_ranks or 1) <= len(gpus):
            named = [("cuda", i) for i in range(num_ranks or len(gpus))]
        elif gpus:
            raise ClusterError(f"{num_ranks} ranks need {num_ranks} GPUs and this machine has {len(gpus)}",
                               hint=f"a plan of at most {len(gpus)} ranks, or --devices cpu:0-{(num_ranks or 1) - 1}")
        else:
            named = [("cpu", i) for i in range(num_ranks or min(usable_cores(), 8))]
        num_cpu = sum(kind == "cpu" for kind, _ in named)
        found = tuple(gpus[i] if kind == "cuda" else _cpu(i, num_cpu) for kind, i in named)
        return cls(
            devices=found if memory is None else _limited(found, memory),
            link=NVLINK if all(kind == "cuda" for kind, _ in named) else LOOPBACK,
        )


def usable_cores() -> int:
    """Cores this process and its ranks may use together: the machine's, or less by affinity or a cgroup's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))


def usable_memory_bytes() -> int:
    """Memory this process and its ranks may use together: the machine's, or less where a cgroup limits it."""
    import psutil

    limits = [psutil.virtual_memory().total]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (_CGROUP / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def _cpu(index: int, num_cpu_ranks: int) -> Device:
    return Device("cpu", index, usable_memory_bytes() // num_cpu_ranks, name="CPU")


def _limited(devices: tuple[Device, ...], text: str) -> tuple[Device, ...]:
    """The devices with the limits that a user sets."""
    sizes = [_size_bytes(word) for word in filter(None, re.split(r"[\s,]+", text))]
    if len(sizes) not in (1, len(devices)):
        raise ClusterError(f"memory '{text}' names {len(sizes)} limits for {len(devices)} devices",
                           hint="one limit for each of them, or one a device in their order")
    if any(device.kind != "cpu" for device in devices):
        raise ClusterError("a memory limit is for CPU ranks, and a GPU's ranks may use what it has",
                           hint="--devices cpu:0-3 --memory 512MiB, or no limit")
    if not sys.platform.startswith("linux"):
        raise ClusterError("memory limits are kept by Linux alone", hint="leave the limit out")
    return tuple(replace(device, memory_bytes=size, is_limit=True)
                 for device, size in zip(devices, sizes * (len(devices) if len(sizes) == 1 else 1), strict=True))


_UNITS = {"": 1, "B": 1, **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
          **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}}


def _size_bytes(text: str) -> int:
    """
    >>> _size_bytes("1.5GiB")
    1610612736
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text)
    unit = next((unit for unit in _UNITS if match and unit.lower() == match[2].lower()), None)
    if match is None or unit is None or float(match[1]) * _UNITS[unit] < 1:
        raise ClusterError(f"can't read the size '{text}'", hint="a number above 0 and a unit, such as 512MiB; units "
                                                                 f"are {', '.join(filter(None, _UNITS))}")
    return int(float(match[1]) * _UNITS[unit])


def _gpus() -> list[Device]:
    # Only NVIDIA's driver node is looked at first, so that a machine without GPUs pays no torch import here.
    if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")):
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(Device("cuda", index, properties.total_memory, name=properties.name))
    return found


def _parse_names(text: str) -> list[tuple[DeviceKind, int]]:
    named: list[tuple[DeviceKind, int]] = []
    for word in filter(None, re.split(r"[\s,]+", text)):
        match = re.fullmatch(r"([a-z]+)(?::(\d+)(?:-(\d+))?)?", word)
        if not match:
            raise ClusterError(f"can't read device '{word}'", hint="devices are named cpu:0,cpu:1 or cuda:0-3")
        kind, first, last = match[1], int(match[2] or 0), int(match[3] or match[2] or 0)
        if kind not in ("cpu", "cuda"):
            raise ClusterError(f"unknown device kind '{kind}', {nearest(kind, ['cpu', 'cuda'])}")
        if last < first:
            raise ClusterError(f"device range '{word}' runs backwards")
        named += [(kind, index) for index in range(first, last + 1)]  # type: ignore[misc]
    if not named:
        raise ClusterError("no device is named", hint="devices are named cpu:0,cpu:1 or cuda:0-3")
    if len(set(named)) < len(named):
        raise ClusterError(f"a device is named twice in '{text}'", hint="one device a rank")
    if len({kind for kind, _ in named}) > 1:
        raise ClusterError(f"'{text}' mixes CPU and CUDA devices", hint="one kind of device a run")
    return named
