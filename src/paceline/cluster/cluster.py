"""What there is: devices with their memory and speed, and the links between them. It knows no models."""

from __future__ import annotations

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, overload

from paceline.base.errors import ClusterError, nearest
from paceline.cluster.accelerators import (
    CONTEXT_BYTES,
    KERNEL_BYTES,
    cards,
    gpus,
    refusal,
    room,
    unusable,
)
from paceline.cluster.catalogue import Accelerator, LinkKind, named_by_driver
from paceline.cluster.catalogue import accelerator as known_accelerator
from paceline.cluster.catalogue import assumed as assumed_accelerator
from paceline.cluster.catalogue import link as known_link
from paceline.cluster.topology import slowest

if TYPE_CHECKING:
    from paceline.job import Precision

DeviceKind = Literal["cpu", "cuda"]

UNKNOWN_LINK = "pcie3"  # between GPUs of which nobody says how they are wired
FREE_STEP_BYTES = 256 * 2**20  # in which a GPU's free memory is counted

HOSTS_HERE = "PACELINE_HOSTS_HERE"  # how many hosts of a run are containers of this machine
_CGROUP, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two devices.

    wait_s: What a collective takes beside its messages, at once after another: ranks and threads that share cores wait
        for each other to get one.
    late_s: What it takes beyond that where ranks have computed for some milliseconds since they met, and so come at
        different times (`LATE_AFTER_S` of `simulate/collectives.py`). In proportion where they computed for less.
    small_s, small_late_s: The same two of a small all-reduce of CPU ranks (`strategies/host_all_reduce.py`), with its
        messages; None where they are not known, and it counts as any other.
    source: Where the figures of a link between GPUs that are here come from, for people.
    """

    bytes_per_s: float
    latency_s: float
    wait_s: float = 0.0
    late_s: float = 0.0
    small_s: float | None = None
    small_late_s: float = 0.0
    source: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Network:
    """How devices reach each other: in a node, and across nodes.

    Devices are numbered node by node. Along an axis of a mesh a group has neighbours `stride` apart, and all groups of
    the axis talk at the same time.

    inside: between devices of a node. across: one device's share of what its node has; None if there is one node.
    devices_per_node: how many have numbers in a row. ports: how many in a node reach its host at full speed at a time.
    process_bytes_per_s, process_latency_s: the most that a process exchanges with servers, whatever the links carry.
    """

    inside: Link
    across: Link | None = None
    devices_per_node: int = 1
    ports: int = 1
    process_bytes_per_s: float = math.inf
    process_latency_s: float = 0.0

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
# small all-reduce is some 100 us. See docs/formulas.md.
LOOPBACK = Link(bytes_per_s=3e9, latency_s=1e-4)
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


class DescribedDevices(Sequence[Device]):
    """The devices of described nodes in rank order, made when asked for: 100,000 take as little room as one."""

    def __init__(self, nodes: tuple[Nodes, ...]) -> None:
        self.nodes = nodes

    def __len__(self) -> int:
        return sum(kind.num_devices for kind in self.nodes)

    @overload
    def __getitem__(self, index: int) -> Device: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Device, ...]: ...
    def __getitem__(self, index: int | slice) -> Device | tuple[Device, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        rest = index + len(self) if index < 0 else index
        for kind in self.nodes:
            if 0 <= rest < kind.num_devices:
                return replace(kind.devices[rest % len(kind.devices)], index=index)
            rest -= kind.num_devices
        raise IndexError(index)

    def __iter__(self) -> Iterator[Device]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DescribedDevices) and self.nodes == other.nodes

    def __hash__(self) -> int:
        return hash(self.nodes)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a run, one a rank, in rank order, and the slowest link between them.

    nodes: of a cluster that is described; none of this machine.
    links: as measured between so many ranks, from the fewest to the most; none were if it is empty.
    """

    devices: Sequence[Device]
    link: Link = LOOPBACK
    nodes: tuple[Nodes, ...] = ()
    links: tuple[tuple[int, Link], ...] = ()

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the description leaves open and is assumed, in words."""
        kinds = {
            device.accelerator
            for kind in self.nodes
            for device in kind.devices
            if device.accelerator is not None
        }
        return tuple(
            sorted(
                f"a GPU of {kind.name} is assumed to have the speed, links and nodes of {kind.assumed}; "
                "name the GPU for its own figures"
                for kind in kinds
                if kind.assumed
            )
        )

    @property
    def first_here(self) -> str:
        """Where a job is tried out on this machine: "cpu", or the first of the GPUs; any GPU for described devices."""
        if self.nodes:
            return "cuda:0" if gpus() else "cpu"
        return next((str(device) for device in self.devices if device.kind == "cuda"), "cpu")

    @property
    def link_of_all(self) -> Link:
        """The link between as many ranks as there are devices, as far as it was measured."""
        enough = [link for count, link in self.links if count >= len(self.devices)]
        return (enough or [link for _, link in self.links[-1:]] or [self.link])[0]

    @property
    def are_shared(self) -> bool:
        """Whether ranks share GPUs, which is for tests: how fast they are says nothing."""
        return not self.nodes and any(device.num_sharing > 1 for device in self.devices)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """A cluster from a word: "local", "2xcpu", "8xH100", "16x8xH100" (nodes x devices), "2x24GB" (GPUs of
        which only the memory is known), or a TOML file.

        Raises:
            ClusterError: it can't be read, names an accelerator that is not in the catalogue, or the file has a field
                that is missing, unknown or makes no sense; the message names all that a file has.
        """
        if text == "local":
            return cls.local()
        if text.endswith(".toml"):
            from paceline.cluster.file import read  # msgspec takes a moment to load

            return cls.of(read(Path(text)))
        match = re.fullmatch(r"(?:(\d{1,7})x)?(\d{1,7})x(\w[\w .-]*)", text.strip())
        if match is None:
            raise ClusterError(
                f"can't read the cluster '{text}'",
                hint="local, 2xcpu, 8xH100, 16x8xH100 (nodes x devices), 2x24GB, or a TOML file",
            )
        count, each = int(match[1] or 1), int(match[2])
        if count < 1 or each < 1:
            raise ClusterError(
                f"the cluster '{text}' has no devices", hint="numbers are at least 1"
            )
        if match[3].lower() == "cpu":
            if count > 1:
                raise ClusterError(
                    f"the cluster '{text}' has CPUs of several nodes, whose links nobody knows",
                    hint="2xcpu is two ranks of this machine",
                )
            return cls.local(f"cpu:0-{each - 1}")
        accelerator = _of_memory(match[3]) or known_accelerator(match[3])
        if match[1] is None and each > accelerator.devices_per_node:
            full, rest = divmod(each, accelerator.devices_per_node)
            if rest:
                raise ClusterError(
                    f"the cluster '{text}' doesn't fill nodes of {accelerator.devices_per_node} devices",
                    hint=f"{full + 1}x{accelerator.devices_per_node}x{accelerator.name}, or nodes x "
                    "devices",
                )
            count, each = full, accelerator.devices_per_node
        return cls.of((usual_nodes(accelerator, count, each),))

    @classmethod
    def of(cls, nodes: tuple[Nodes, ...]) -> Cluster:
        """A cluster of described nodes."""
        slowest = min(
            (kind.network.across or kind.network.inside for kind in nodes),
            key=lambda link: link.bytes_per_s,
        )
        return cls(DescribedDevices(nodes), slowest, nodes)

    def resized(self, count: int) -> Cluster:
        """So many devices of the same kind, in nodes of the same size.

        Raises:
            ClusterError: the cluster is this machine or has several kinds of nodes, or the devices don't fill nodes.
        """
        if len(self.nodes) != 1:
            raise ClusterError(
                "more or fewer devices are thought of only where all nodes are described and alike",
                hint="a cluster such as 8xH100 or 2x8xA100",
            )
        (kind,) = self.nodes
        each = len(kind.devices)
        if count > each and count % each:
            raise ClusterError(
                f"{count} devices don't fill nodes of {each}",
                hint=f"{count // each * each} or {-(-count // each) * each} devices",
            )
        devices = kind.devices[: min(count, each)]
        return Cluster.of(
            (
                replace(
                    kind,
                    count=max(1, count // each),
                    devices=devices,
                    network=replace(kind.network, devices_per_node=len(devices)),
                ),
            )
        )

    def price_per_hour(self, count: int) -> float | None:
        """Of the first so many devices; None if some have no price."""
        price = 0.0
        for kind in self.nodes:
            if kind.price_per_hour is None:
                return None
            price += min(count, kind.num_devices) * kind.price_per_hour
            count -= min(count, kind.num_devices)
        return price if self.nodes else None

    def span(self, first: int, count: int) -> list[tuple[Device, Network]]:
        """The kinds of devices that so many ranks from the first on run on, with their networks."""
        kinds: list[tuple[Device, Network]] = []
        begin = 0
        for kind in self.nodes:
            end = begin + kind.num_devices
            low, high = max(first, begin), min(first + count, end)
            if low < high:
                each = len(kind.devices)
                seen = (
                    kind.devices
                    if high - low >= each
                    else [kind.devices[i % each] for i in range(low - begin, high - begin)]
                )
                by_id = {id(device): device for device in seen}
                kinds += [(device, kind.network) for device in dict.fromkeys(by_id.values())]
            begin = end
        return kinds

    @classmethod
    def local(
        cls,
        devices: str | None = None,
        *,
        num_ranks: int | None = None,
        memory: str | None = None,
        num_cpu_ranks: int = 0,
        whole: bool = False,
    ) -> Cluster:
        """This machine: its GPUs if it has any, else one CPU device a core (8 at most).

        Args:
            devices: Names such as "cpu:0,cpu:1" or "cuda:0-3", one a rank; "4xcuda:0" is four ranks that share a GPU.
            num_ranks: Ranks to make room for; CPU ranks may outnumber cores, GPU ranks may not outnumber GPUs.
            num_cpu_ranks: How many of them, the first ones, compute on the CPU also where the others have GPUs. Names
                of GPUs alone leave them out.
            memory: The limit of each CPU rank, such as "512MiB", or of all in order, "1GiB,2GiB"; by default ranks
                share the machine's memory and none is stopped.
            whole: Whether GPUs count with all their memory, free or not: ranks of a launcher start at their own times,
                see each other's memory as taken, and must all find the same.

        Raises:
            ClusterError: a device doesn't exist, or a name or a size can't be read.
        """
        for name, value, example in (
            ("devices", devices, "'cuda:0-3' or 'cpu:0,cpu:1'"),
            ("memory", memory, "'512MiB'"),
        ):
            if value is not None and not isinstance(value, str):
                raise ClusterError(f"{name} is text, got {value!r}", hint=f"such as {example}")
        here = _gpus()
        if devices is not None:
            named = _with_cpus(_parse_names(devices), num_cpu_ranks, devices)
            for kind, index in named:
                if kind == "cuda" and index >= len(here):
                    raise ClusterError(
                        f"there is no cuda:{index}: this machine has {len(here)} GPUs",
                        hint=f"{_devices_option('cpu:0')} runs on the CPU",
                    )
        elif here and (num_ranks or 1) - num_cpu_ranks <= len(here):
            num_gpu_ranks = len(here) if num_ranks is None else num_ranks - num_cpu_ranks
            named = _with_cpus([("cuda", i) for i in range(num_gpu_ranks)], num_cpu_ranks, "")
        elif here:
            assert num_ranks is not None
            needed, beside = (
                num_ranks - num_cpu_ranks,
                num_cpu_ranks and f" beside {num_cpu_ranks} on CPUs",
            )
            raise ClusterError(
                f"{needed} ranks{beside or ''} need {needed} GPUs and this machine has {len(here)}",
                hint=f"a plan of at most {len(here)} rank{'s' * (len(here) > 1)}{beside or ''}, or "
                f"{_devices_option(f'cpu:0-{num_ranks - 1}')}; for a test, "
                f"{_devices_option(f'{needed}xcuda:0')} lets ranks share a GPU",
            )
        elif idle := unusable():
            cpus = f"cpu:0-{num_ranks - 1}" if num_ranks and num_ranks > 1 else "cpu:0"
            raise ClusterError(
                idle.reason, hint=f"{idle.way_out}; {_devices_option(cpus)} trains on the CPU"
            )
        else:
            named = [("cpu", i) for i in range(num_ranks or min(usable_cores(), 8))]
        num_cpu, sharing = sum(kind == "cpu" for kind, _ in named), Counter(named)
        listed = tuple(
            _shared(here[i] if whole else _with_free(here[i]), sharing[kind, i])
            if kind == "cuda"
            else _cpu(i, num_cpu)
            for kind, i in named
        )
        are_own_gpus = all(device.kind == "cuda" and device.num_sharing == 1 for device in listed)
        return cls(
            devices=listed if memory is None else _limited(listed, memory),
            link=_between_gpus([i for _, i in named]) if are_own_gpus else LOOPBACK,
        )


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


def usual_nodes(accelerator: Accelerator, count: int, each: int) -> Nodes:
    """Nodes as an accelerator usually comes in."""
    return Nodes(
        count,
        (described(accelerator),) * each,
        Network(
            link_of(known_link(accelerator.link)), link_of(known_link(accelerator.network)), each
        ),
    )


_NAMING = (
    "devices are named cpu:0,cpu:1 or cuda:0-3; 4xcuda:0 is four ranks that share a GPU, for tests"
)


def usable_cores() -> int:
    """Cores this process and its ranks may use together: the machine's, or less by affinity or a cgroup's quota."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min([allowed, *(max(1, quota // period) for quota, period in _cpu_quotas())])


def _cpu_quotas() -> Iterator[tuple[int, int]]:
    """Microseconds of all cores together, and in how many, of each cgroup of this process that has such a limit."""
    for root, controller, names in (
        (_CGROUP, "", ("cpu.max",)),
        (_CGROUP / "cpu", "cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
    ):
        for folder in _cgroups(root, controller):
            words = " ".join(filter(None, (_text(folder / name) for name in names))).split()
            if len(words) == 2 and all(map(str.isdigit, words)):  # "max" and "-1" are no limit
                yield int(words[0]), int(words[1])


def threads_of_a_rank(num_ranks: int) -> int:
    """With which each of so many CPU ranks of this machine computes: its share of the cores, or OMP_NUM_THREADS.

    Where a run's hosts are containers of one machine, `paceline launch docker` tells each one how many they are: each
    sees all cores.
    """
    omp_threads, hosts = (os.environ.get(name, "") for name in ("OMP_NUM_THREADS", HOSTS_HERE))
    if omp_threads.isdecimal() and int(omp_threads) > 0:
        return int(omp_threads)
    return max(1, usable_cores() // (num_ranks * (max(1, int(hosts)) if hosts.isdecimal() else 1)))


def usable_memory_bytes() -> int:
    """Memory this process and its ranks may use together: the machine's, or less where a cgroup limits it."""
    import psutil

    return min(
        [psutil.virtual_memory().total, *(limit_bytes for limit_bytes, _ in _memory_limits())]
    )


def free_memory_bytes() -> int:
    """Memory that this process and others could take now: the machine's, or less where a cgroup limits it. What the
    system would take back from its cache of files counts as free."""
    import psutil

    return max(
        0,
        min(
            [
                psutil.virtual_memory().available,
                *(limit_bytes - used_bytes for limit_bytes, used_bytes in _memory_limits()),
            ]
        ),
    )


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Limit and use, in bytes, of each cgroup that this process is in and that has a limit. Files in the cache are not
    counted as used."""
    for root, controller, limit, used, prefix in (
        (_CGROUP, "", "memory.max", "memory.current", ""),
        (_CGROUP / "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        for folder in _cgroups(root, controller):
            if (limit_bytes := _text(folder / limit)).isdigit():
                cached = re.findall(
                    rf"^{prefix}(?:in)?active_file (\d+)$",
                    _text(folder / "memory.stat"),
                    re.MULTILINE,
                )
                yield int(limit_bytes), int(_text(folder / used) or 0) - sum(map(int, cached))


def _text(path: Path) -> str:
    """What a file of the system says; "" if it is not there."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the cgroups that this process is in, from its own to the root, as far as they can be seen.

    controller: of cgroups of version 1; "" for version 2.
    """
    for _, controllers, path in (line.split(":", 2) for line in _text(_OWN_CGROUPS).splitlines()):
        if controllers.split(",").count(controller):
            place = PurePosixPath(path.lstrip("/"))
            yield from (
                root / parent for parent in (place, *place.parents) if str(parent) not in ("", ".")
            )
    yield root


def _devices_option(devices: str) -> str:
    """How a user asks for devices, of a command and of a function."""
    return f'--devices {devices} (in Python devices="{devices}")'


def _cpu(index: int, num_cpu_ranks: int) -> Device:
    return Device("cpu", index, usable_memory_bytes() // num_cpu_ranks, name="CPU")


def _shared(device: Device, num_ranks: int) -> Device:
    return replace(device, memory_bytes=device.memory_bytes // num_ranks, num_sharing=num_ranks)


def _limited(devices: tuple[Device, ...], text: str) -> tuple[Device, ...]:
    """The devices with the limits that a user sets."""
    sizes = [size_bytes(word) for word in filter(None, re.split(r"[\s,]+", text))]
    if len(sizes) not in (1, len(devices)):
        raise ClusterError(
            f"memory '{text}' names {len(sizes)} limits for {len(devices)} devices",
            hint="one limit for each of them, or one a device in their order",
        )
    if any(device.kind != "cpu" for device in devices):
        raise ClusterError(
            "a memory limit is for CPU ranks, and a GPU's ranks may use what it has",
            hint="--devices cpu:0-3 --memory 512MiB, or no limit",
        )
    if not sys.platform.startswith("linux"):
        raise ClusterError("memory limits are kept by Linux alone", hint="leave the limit out")
    return tuple(
        replace(device, memory_bytes=size, is_limit=True)
        for device, size in zip(
            devices, sizes * (len(devices) if len(sizes) == 1 else 1), strict=True
        )
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


def _gpus() -> list[Device]:
    return [
        Device(
            "cuda",
            index,
            gpu.memory_bytes,
            name=gpu.name,
            context_bytes=CONTEXT_BYTES + KERNEL_BYTES,
            workspace_bytes=gpu.workspace_bytes,
        )
        for index, gpu in enumerate(gpus())
    ]


def _between_gpus(indices: Sequence[int]) -> Link:
    """The slowest link between GPUs that are here, as NVML says they are wired; what it doesn't know counts as the
    slowest that servers have, until it is measured (`api/links.py`)."""
    wire = slowest([cards()[index] for index in indices]) if len(indices) > 1 else None
    if wire is None:
        return replace(
            link_of(known_link(UNKNOWN_LINK)), source=f"not known, counted as {UNKNOWN_LINK}"
        )
    return Link(wire.bytes_per_s, wire.latency_s, source=f"{wire.name}, as the driver says")


def _with_free(device: Device) -> Device:
    """A GPU with the memory that it has free, in steps, so that devices of one kind stay alike."""
    memory = room(device.index)
    if memory.free_bytes >= device.memory_bytes - FREE_STEP_BYTES:
        return device
    return replace(
        device,
        memory_bytes=memory.free_bytes // FREE_STEP_BYTES * FREE_STEP_BYTES,
        total_bytes=device.memory_bytes,
        holders=memory.holders,
    )


def names_of(devices: Sequence[object]) -> str:
    """Devices, or their names, as a user names them.

    >>> names_of(["cuda:0", "cuda:0", "cuda:1"])
    '2xcuda:0,cuda:1'
    """
    runs = ((name, len(list(run))) for name, run in groupby(map(str, devices)))
    return ",".join(name if times == 1 else f"{times}x{name}" for name, times in runs)


def _parse_names(text: str) -> list[tuple[DeviceKind, int]]:
    named: list[tuple[DeviceKind, int]] = []
    for word in filter(None, re.split(r"[\s,]+", text)):
        match = re.fullmatch(r"(?:(\d{1,4})x)?([a-z]+)(?::(\d{1,4})(?:-(\d{1,4}))?)?", word)
        if not match:
            raise ClusterError(f"can't read device '{word}'", hint=_NAMING)
        kind, first, last = match[2], int(match[3] or 0), int(match[4] or match[3] or 0)
        times = int(match[1] or 1)
        if refused := refusal(kind):
            raise ClusterError(refused.reason, hint=refused.way_out)
        if kind not in ("cpu", "cuda"):
            raise ClusterError(f"unknown device kind '{kind}', {nearest(kind, ['cpu', 'cuda'])}")
        if last < first:
            raise ClusterError(f"device range '{word}' runs backwards")
        if match[1] and (kind == "cpu" or times < 1):
            raise ClusterError(
                f"'{word}' is not a number of ranks that share a GPU",
                hint="4xcuda:0 is four of them; ranks on the CPU are numbered: cpu:0-3",
            )
        indices, known = range(first, last + 1), set(named)
        if repeated := [index for index in indices if (kind, index) in known]:
            raise ClusterError(
                f"a device is named twice in '{text}': {kind}:{repeated[0]}",
                hint=f"one device a rank; for a test, 2x{kind}:{repeated[0]} is two ranks that share it"
                if kind == "cuda"
                else "one device a rank",
            )
        named += [(kind, index) for index in indices for _ in range(times)]  # type: ignore[misc]
    if not named:
        raise ClusterError("no device is named", hint=_NAMING)
    return named


def _with_cpus(
    named: list[tuple[DeviceKind, int]], num_cpu_ranks: int, text: str
) -> list[tuple[DeviceKind, int]]:
    """The devices in rank order, where the first so many ranks compute on the CPU and the others on GPUs."""
    cpus, gpus_named = ([name for name in named if name[0] == kind] for kind in ("cpu", "cuda"))
    if not gpus_named:
        return named
    if not cpus:
        return [*(("cpu", index) for index in range(num_cpu_ranks)), *gpus_named]
    if not num_cpu_ranks:
        raise ClusterError(
            f"'{text}' mixes CPU and CUDA devices",
            hint="one kind of device a run; only servers compute on the CPU beside GPUs, under a plan "
            "such as 'server=1 workers=2' with --devices cuda:0-1,cpu:0",
        )
    if len(cpus) != num_cpu_ranks:
        raise ClusterError(
            f"'{text}' names {len(cpus)} CPUs, and {num_cpu_ranks} ranks of the plan, its servers, "
            "compute on the CPU beside GPUs",
            hint="GPUs alone leave them out",
        )
    return [*cpus, *gpus_named]
