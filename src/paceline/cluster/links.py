"""Links between devices, and the network that they make."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


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
