"""What collectives cost: on a ring in a node, and on rings and trees across nodes."""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.cluster.links import Link, Network
from paceline.simulate.program import COMPUTE, Collective

# Of computing since ranks met, after which the time that they wait for each other grows no further: with two ranks on
# two cores it was 0.9 ms after 0.5 ms of products, 1.1 after 2 ms, 2.1 after 6 ms, and 2.1 to 2.5 after 12 to 18 ms.
LATE_AFTER_S = 12e-3


def collective_s(event: Collective, network: Network, computed_s: float = 0.0) -> float:
    """Seconds of a collective on a ring of equal links.

    Ranks first wait for each other, as far as they are known to: `Link.wait_s`, and `Link.late_s` where they have
    computed since they met last. Ranks that share memory have their own figures of waits and of the rate. Each of a
    collective's steps sends 1/n of the tensor to the next rank; contention is left out. Across nodes a group's
    members in a node each drive their own share of its network, so that the slower of the link in the node and
    these shares together sets the pace; each hop waits for its own link's latency, and an all-reduce crosses nodes
    on a tree where that is faster than around the ring.
    computed_s: of that computing; of several collectives a part comes before each.
    Sources: Thakur, Rabenseifner and Gropp 2005, Optimization of collective communication operations in MPICH;
    NCCL's rings with one channel a network card, and its double trees (Sanders, Speck and Träff 2009).

    >>> collective_s(Collective("all_reduce", 4e9, group=4), Network(Link(bytes_per_s=1e9, latency_s=0.5)))
    9.0
    """
    if event.servers:
        return _with_servers_s(event, network, computed_s)
    if event.group <= 1:
        return 0.0
    steps = RING_STEPS[event.kind](event.group)
    inside, across = network.inside, network.across
    together = network.in_a_node(event.group, event.stride)
    if across is None or together == event.group:
        late = min(event.times, computed_s / LATE_AFTER_S)
        part_bytes = event.num_bytes / event.group
        if inside.memory_wait_s is not None and not event.is_compressed:
            moving_s = steps * part_bytes / inside.memory_bytes_per_s
            return late * inside.memory_late_s + event.times * (inside.memory_wait_s + moving_s)
        return late * inside.late_s + event.times * (
            inside.wait_s + steps * (inside.latency_s + part_bytes / inside.bytes_per_s)
        )
    bytes_per_s = across.bytes_per_s * together
    if together > 1:
        bytes_per_s = min(bytes_per_s, inside.bytes_per_s)
    nodes = math.ceil(event.group / together)
    passes = steps // (event.group - 1)
    hops = passes * (nodes - 1)
    if event.kind == "all_reduce":
        hops = min(hops, 2 * math.ceil(math.log2(nodes)))
    latency_s = hops * across.latency_s + passes * (together - 1) * inside.latency_s
    return event.times * (latency_s + steps * event.num_bytes / event.group / bytes_per_s)


def _with_servers_s(event: Collective, network: Network, computed_s: float) -> float:
    """All workers send all servers their part, or take it from them, at the same time.

    A worker's link carries the whole tensor, a server's the parts of all workers (incast), and the slower of the two
    sets the pace. In one process a part needs no link. Nodes talk as one: what their devices send is added up before
    it leaves them. No process reads and writes faster than it can. Where computing stops for weights, they come once
    the last worker has sent its gradients: workers wait as ranks of a collective do.
    Source: Jiang et al. 2020 (BytePS), section 2; the queue at a server is work that waits in turn.
    """
    together = min(event.group, network.devices_per_node) if network.across is not None else 1
    nodes = math.ceil(event.group / together)
    if network.across is None or nodes == 1:
        link, workers, servers = network.inside, event.group, event.servers * network.ports
    else:
        link = Link(network.across.bytes_per_s * network.devices_per_node, network.across.latency_s)
        workers, servers = nodes, min(event.servers, nodes)
    away = 1.0
    if event.is_colocated and (network.across is None or nodes > 1):
        away = (workers - 1) / workers
    server_load = workers * away / servers
    worker_load = 1 - 1 / servers if event.is_colocated else 1.0
    on_links_s = event.num_bytes * max(server_load, worker_load) / link.bytes_per_s
    wait_s = (
        link.wait_s + min(1.0, computed_s / LATE_AFTER_S) * link.late_s
        if event.stream == COMPUTE
        else 0.0
    )
    return event.times * (
        wait_s + max(link.latency_s + on_links_s, _by_processes_s(event, network))
    )


def _by_processes_s(event: Collective, network: Network) -> float:
    """Of the busiest process: a server has the parts of all workers, a worker those of all servers."""
    colocated = 1 if event.is_colocated else 0
    parts = max((event.group - colocated) / event.servers, 1 - colocated / event.servers)
    return network.process_latency_s + event.num_bytes * parts / network.process_bytes_per_s


# Steps of the ring, each with 1/n of the tensor. An all-reduce is a reduce-scatter and an all-gather.
RING_STEPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
}
