"""The devices of a cluster that a plan uses."""

from __future__ import annotations

from paceline.base.errors import PlanError
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.strategies.plan import Plan


def devices_of(plan: Plan, cluster: Cluster) -> tuple[Device, ...]:
    """Return the device of every rank.

    If a cluster lists the devices of one host, it stands for as many such hosts as needed. CPUs
    beside GPUs are for servers; they are on the first host.
    """
    hosts, rest = divmod(plan.world_size, len(cluster.devices))
    if rest and hosts:
        raise PlanError(
            f"plan '{plan}' needs {plan.world_size} devices and there are {len(cluster.devices)} a host",
            hint=f"a plan of {len(cluster.devices)} ranks, or of a multiple of it on several hosts",
        )
    others = tuple(device for device in cluster.devices if device.kind == cluster.devices[-1].kind)
    return (*cluster.devices, *(others * hosts))[: plan.world_size]
