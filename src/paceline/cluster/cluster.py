"""The devices of a run with their memory and speed, and the links between them.

This module knows no models.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

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
from paceline.cluster.catalogue import Accelerator
from paceline.cluster.catalogue import accelerator as known_accelerator
from paceline.cluster.catalogue import link as known_link
from paceline.cluster.devices import (
    Device,
    DeviceKind,
    Nodes,
    _of_memory,
    described,
    link_of,
    size_bytes,
)
from paceline.cluster.limits import usable_cores, usable_memory_bytes
from paceline.cluster.links import LOOPBACK, Link, Network
from paceline.cluster.topology import slowest

UNKNOWN_LINK = "pcie3"  # the assumed link between GPUs whose links are not known
FREE_STEP_BYTES = 256 * 2**20  # a GPU's free memory is rounded down to a multiple of this

HOSTS_HERE = "PACELINE_HOSTS_HERE"  # how many hosts of a run are containers of this machine


@dataclass(frozen=True)
class DescribedDevices(Sequence[Device]):
    """The devices of described nodes in rank order.

    They are made on request, so 100,000 take as little room as one.
    """

    nodes: tuple[Nodes, ...]

    def __len__(self) -> int:
        return sum(kind.num_devices for kind in self.nodes)

    @overload
    def __getitem__(self, index: int) -> Device: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Device, ...]: ...
    def __getitem__(self, index: int | slice) -> Device | tuple[Device, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        number = rest = index + len(self) if index < 0 else index
        for kind in self.nodes:
            if 0 <= rest < kind.num_devices:
                return replace(kind.devices[rest % len(kind.devices)], index=number)
            rest -= kind.num_devices
        raise IndexError(index)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a run, one a rank, in rank order, and the slowest link between them."""

    devices: Sequence[Device]
    link: Link = LOOPBACK
    nodes: tuple[Nodes, ...] = ()  # of a described cluster; empty for this machine
    # Numbers of ranks with the link that was measured between so many, from the fewest to the most;
    # empty if no link was measured.
    links: tuple[tuple[int, Link], ...] = ()

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences on what the description of the cluster leaves open and Paceline assumes."""
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
        """The device of this machine on which a job is tried out: the cluster's first GPU, or "cpu"
        if it has none.

        For a described cluster it is this machine's first GPU, if it has one.
        """
        if self.nodes:
            return "cuda:0" if gpus() else "cpu"
        return next((str(device) for device in self.devices if device.kind == "cuda"), "cpu")

    @property
    def link_of_all(self) -> Link:
        """The link as measured between as many ranks as there are devices, or more.

        Without such a measurement it is the link between the most ranks that were measured, or
        `link` if none were.
        """
        enough = [link for count, link in self.links if count >= len(self.devices)]
        return (enough or [link for _, link in self.links[-1:]] or [self.link])[0]

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Return the cluster that a word or a TOML file describes.

        Words are "local", "2xcpu", "8xH100", "16x8xH100" (nodes x devices), and "2x24GB" (GPUs of
        which only the memory is known).

        Raises:
            ClusterError: it can't be read, names an accelerator that is not in the catalogue, or
                the file has a field that is missing, unknown or makes no sense; the message names
                all that a file has.
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
        """Return a cluster of described nodes."""
        slowest = min(
            (kind.network.across or kind.network.inside for kind in nodes),
            key=lambda link: link.bytes_per_s,
        )
        return cls(DescribedDevices(nodes), slowest, nodes)

    def resized(self, count: int) -> Cluster:
        """Return a cluster of `count` devices of the same kind, in nodes of the same size.

        Raises:
            ClusterError: the cluster is this machine or has several kinds of nodes, or the devices
                don't fill nodes.
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
        """Return the price of the first `count` devices for an hour; None if some have no price."""
        price = 0.0
        for kind in self.nodes:
            if kind.price_per_hour is None:
                return None
            price += min(count, kind.num_devices) * kind.price_per_hour
            count -= min(count, kind.num_devices)
        return price if self.nodes else None

    def span(self, first: int, count: int) -> list[tuple[Device, Network]]:
        """Return the kinds of devices, with their networks, on which `count` ranks from `first` on
        run.
        """
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
        """Return the cluster of this machine: its GPUs if it has any, else one CPU device a core (8
        at most).

        Args:
            devices: Names such as "cpu:0,cpu:1" or "cuda:0-3", one a rank.
            num_ranks: Ranks to make room for; CPU ranks may outnumber cores, GPU ranks may not
                outnumber GPUs.
            num_cpu_ranks: How many of them, the first ones, compute on the CPU also where the
                others have GPUs. Names of GPUs alone leave them out.
            memory: The limit of each CPU rank, such as "512MiB", or of all in order, "1GiB,2GiB";
                by default ranks share the machine's memory and none is stopped.
            whole: Whether GPUs count with all their memory, free or not. A launcher needs this: its
                ranks start at different times and see each other's memory as taken, but must all
                find the same devices.

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
                f"{_devices_option(f'cpu:0-{num_ranks - 1}')}",
            )
        elif idle := unusable():
            cpus = f"cpu:0-{num_ranks - 1}" if num_ranks and num_ranks > 1 else "cpu:0"
            raise ClusterError(
                idle.reason, hint=f"{idle.way_out}; {_devices_option(cpus)} trains on the CPU"
            )
        else:
            named = [("cpu", i) for i in range(num_ranks or min(usable_cores(), 8))]
        num_cpu = sum(kind == "cpu" for kind, _ in named)
        listed = tuple(
            _cpu(i, num_cpu) if kind == "cpu" else here[i] if whole else _with_free(here[i])
            for kind, i in named
        )
        return cls(
            devices=listed if memory is None else _limited(listed, memory),
            link=LOOPBACK if num_cpu else _between_gpus([i for _, i in named]),
        )


def usual_nodes(accelerator: Accelerator, count: int, each: int) -> Nodes:
    """Return nodes with the links and networks that an accelerator usually has."""
    return Nodes(
        count,
        (described(accelerator),) * each,
        Network(
            link_of(known_link(accelerator.link)), link_of(known_link(accelerator.network)), each
        ),
    )


_NAMING = (
    "name one device for each rank, as cuda:0-3 or cpu:0,cpu:1; NCCL refuses two ranks on one GPU"
)


def threads_of_a_rank(num_ranks: int) -> int:
    """Return the number of threads with which each CPU rank computes: OMP_NUM_THREADS, or its share
    of the cores.

    If a run's hosts are containers of one machine, each of them sees all cores. `paceline launch
    docker` therefore tells each container how many there are.
    """
    omp_threads, hosts = (os.environ.get(name, "") for name in ("OMP_NUM_THREADS", HOSTS_HERE))
    if omp_threads.isdecimal() and int(omp_threads) > 0:
        return int(omp_threads)
    return max(1, usable_cores() // (num_ranks * (max(1, int(hosts)) if hosts.isdecimal() else 1)))


def _devices_option(devices: str) -> str:
    """Return the text that tells a user how to ask for devices, in a command and in Python."""
    return f'--devices {devices} (in Python devices="{devices}")'


def _cpu(index: int, num_cpu_ranks: int) -> Device:
    return Device("cpu", index, usable_memory_bytes() // num_cpu_ranks, name="CPU")


def _limited(devices: tuple[Device, ...], text: str) -> tuple[Device, ...]:
    """Return the devices with the memory limits that a user sets.

    Raises:
        ClusterError: the limits don't fit the devices, or this system can't keep them.
    """
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
    """Return the slowest link between GPUs of this machine, by NVML's report.

    A link that NVML doesn't know counts as the slowest that servers have, until it is measured
    (`api/links.py`).
    """
    wire = slowest([cards()[index] for index in indices]) if len(indices) > 1 else None
    if wire is None:
        return replace(
            link_of(known_link(UNKNOWN_LINK)), source=f"not known, counted as {UNKNOWN_LINK}"
        )
    return replace(wire, source=f"{wire.source}, as the driver says")


def _with_free(device: Device) -> Device:
    """Return a GPU with only its free memory, rounded down in steps so that devices of one kind
    stay equal.
    """
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
    """Return a list of devices, or of their names, as the text with which a user asks for them.

    >>> names_of(["cuda:0", "cuda:1"])
    'cuda:0,cuda:1'
    """
    return ",".join(map(str, devices))


def _parse_names(text: str) -> list[tuple[DeviceKind, int]]:
    named: list[tuple[DeviceKind, int]] = []
    for word in filter(None, re.split(r"[\s,]+", text)):
        match = re.fullmatch(r"([a-z]+)(?::(\d{1,4})(?:-(\d{1,4}))?)?", word)
        if not match:
            raise ClusterError(f"can't read device '{word}'", hint=_NAMING)
        kind, first, last = match[1], int(match[2] or 0), int(match[3] or match[2] or 0)
        if refused := refusal(kind):
            raise ClusterError(refused.reason, hint=refused.way_out)
        if kind not in ("cpu", "cuda"):
            raise ClusterError(f"unknown device kind '{kind}', {nearest(kind, ['cpu', 'cuda'])}")
        if last < first:
            raise ClusterError(f"device range '{word}' runs backwards")
        indices, known = range(first, last + 1), set(named)
        if repeated := [index for index in indices if (kind, index) in known]:
            raise ClusterError(
                f"a device is named twice in '{text}': {kind}:{repeated[0]}",
                hint=_NAMING,
            )
        named += [(kind, index) for index in indices]  # type: ignore[misc]
    if not named:
        raise ClusterError("no device is named", hint=_NAMING)
    return named


def _with_cpus(
    named: list[tuple[DeviceKind, int]], num_cpu_ranks: int, text: str
) -> list[tuple[DeviceKind, int]]:
    """Return the devices in rank order: the first `num_cpu_ranks` ranks compute on the CPU, the
    others on GPUs.

    Raises:
        ClusterError: `text`, which a user gave, does not name such devices.
    """
    cpus, gpus_named = ([name for name in named if name[0] == kind] for kind in ("cpu", "cuda"))
    if not gpus_named:
        return named
    if not cpus:
        return [*(("cpu", index) for index in range(num_cpu_ranks)), *gpus_named]
    if not num_cpu_ranks:
        raise ClusterError(
            f"'{text}' mixes CPU and CUDA devices",
            hint="one kind of device a run; only servers compute on the CPU beside GPUs, under a plan "
            "such as 'servers=1 workers=2' with --devices cuda:0-1,cpu:0",
        )
    if len(cpus) != num_cpu_ranks:
        raise ClusterError(
            f"'{text}' names {len(cpus)} CPUs, and {num_cpu_ranks} ranks of the plan, its servers, "
            "compute on the CPU beside GPUs",
            hint="GPUs alone leave them out",
        )
    return [*cpus, *gpus_named]
