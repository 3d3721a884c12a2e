"""Links between devices, and the network that they make."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of the link between two devices."""

    bytes_per_s: float
    latency_s: float
    # Time of a collective in addition to its messages, if it follows another at once: ranks and
    # threads that share cores wait until they get one.
    wait_s: float = 0.0
    # Time in addition to `wait_s` if ranks have computed for some milliseconds since the last
    # collective, and so come at different times (`LATE_AFTER_S` of `simulate/collectives.py`). It
    # is proportionally less if they computed for less time.
    late_s: float = 0.0
    # The same figures for CPU ranks that exchange tensors in memory (`launch/collectives/group.py`).
    # If `memory_wait_s` is None they are not known, and such exchanges count as messages.
    memory_wait_s: float | None = None
    memory_late_s: float = 0.0
    memory_bytes_per_s: float = 0.0
    # The origin of the figures of a link between GPUs of this machine, for people to read.
    source: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Network:
    """The links between devices within a node and across nodes.

    Devices are numbered node by node. Along an axis of a mesh, neighbours of a group have numbers
    that are `stride` apart, and all groups of the axis communicate at the same time.
    """

    inside: Link  # between devices of a node
    across: Link | None = None  # one device's share of its node's link; None if there is one node
    devices_per_node: int = 1  # devices with consecutive numbers that form a node
    ports: int = 1  # devices of a node that can reach its host at full speed at the same time
    # The highest rate, and the latency, with which a process exchanges data with servers, whatever
    # the links carry.
    process_bytes_per_s: float = math.inf
    process_latency_s: float = 0.0

    def in_a_node(self, group: int, stride: int) -> int:
        """Return how many ranks of a group are in one node."""
        if self.across is None:
            return group
        return max(1, min(group, self.devices_per_node // stride))

    def between(self, rank: int, other: int) -> Link:
        """Return the link from one device to another."""
        if self.across is None or rank // self.devices_per_node == other // self.devices_per_node:
            return self.inside
        return self.across


# Two processes over loopback with gloo: 2.4-3.9 GB/s for 25 MB messages, measured on 2 cores;
# latency of a small all-reduce is some 100 us. See docs/formulas.md.
LOOPBACK = Link(bytes_per_s=3e9, latency_s=1e-4)
