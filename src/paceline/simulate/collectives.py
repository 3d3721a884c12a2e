"""What collectives cost on a ring."""

from __future__ import annotations

from collections.abc import Callable

from paceline.cluster import Link
from paceline.simulate.program import Collective, CollectiveName


def collective_s(event: Collective, link: Link) -> float:
    """Seconds of a collective on a ring of equal links.

    Each of its steps sends 1/n of the tensor to the next rank; contention is left out.
    Source: Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH.

    >>> collective_s(Collective("all_reduce", 4e9, group=4), Link(bytes_per_s=1e9, latency_s=0.5))
    9.0
    """
    if event.group <= 1:
        return 0.0
    steps = RING_STEPS[event.kind](event.group)
    return event.times * steps * (link.latency_s + event.num_bytes / event.group / link.bytes_per_s)


# Steps of the ring, each with 1/n of the tensor. An all-reduce is a reduce-scatter and an all-gather.
RING_STEPS: dict[CollectiveName, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
}
