"""How long ranks of this machine wait for each other: measured with as many as there will be, kept in a cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from paceline.cluster import LOOPBACK, Cluster, Link
from paceline.launch.context import RankContext
from paceline.launch.failure import RankFailed
from paceline.profile import cache

CACHED = "links"
MOST_RANKS = 8  # with so many at most; more wait as those do
SMALL, LARGE = 60, 8  # collectives of each size that are timed
LARGE_BYTES = 8 * 2**20  # gathered by each rank
BUSY_SIDE = 256  # of a product of matrices that each rank computes before each collective
TIMEOUT_S = 30.0


def with_links(cluster: Cluster, *, measure: bool = True) -> Cluster:
    """The cluster with what its CPU ranks were found to wait for a collective, by their number.

    Takes a second or two the first time: ranks are started. GPUs and described devices stay as they are, and so does a
    cluster whose ranks can't be started.

    measure: whether what is not in the cache is measured; no where ranks are at work.
    """
    if cluster.nodes or len(cluster.devices) < 2 or any(device.kind != "cpu" for device in cluster.devices):
        return cluster
    found = _read()
    wanted = _counts(len(cluster.devices))
    missing = [count for count in wanted if count not in found]
    if missing and measure:
        with suppress(RankFailed, OSError):
            found |= {count: measure_link(cluster, count) for count in missing}
            cache.write(CACHED, "cpu", {count: [link.bytes_per_s, link.latency_s, link.wait_s]
                                        for count, link in sorted(found.items())})
    return replace(cluster, links=tuple((count, found[count]) for count in wanted if count in found))


def measure_link(cluster: Cluster, num_ranks: int) -> Link:
    """Between so many CPU ranks that compute and meet in turns, as in training.

    Raises:
        RankFailed: a rank failed. PacelineError: ranks can't be started from this process.
    """
    from paceline.launch.local import run_local

    devices = [replace(cluster.devices[0], index=index, is_limit=False) for index in range(num_ranks)]
    return Link(*run_local(_rank_times, devices, timeout_s=TIMEOUT_S)[0])


def _counts(num_devices: int) -> list[int]:
    """2, 4, 8 and all, as far as there are devices."""
    most = min(num_devices, MOST_RANKS)
    return sorted({most, *(count for count in (2, 4, 8) if count <= most)})


def _rank_times(context: RankContext) -> tuple[float, float, float]:
    """A link's figures, as this rank sees them. Collective over the default group."""
    import torch
    import torch.distributed as dist

    n, matrix = context.world_size, torch.ones(BUSY_SIDE, BUSY_SIDE)
    small, part = torch.zeros(1), torch.zeros(LARGE_BYTES // 4 // n)
    whole = [torch.zeros_like(part) for _ in range(n)]

    def each_s(times: int, collective: Callable[[], object]) -> float:
        """Of a product and a collective after it."""
        collective()
        began_s = time.perf_counter()
        for _ in range(times):
            matrix @ matrix
            collective()
        return (time.perf_counter() - began_s) / times

    computed_s = each_s(SMALL, lambda: None)
    small_s = each_s(SMALL, lambda: dist.all_reduce(small))
    large_s = each_s(LARGE, lambda: dist.all_gather(whole, part))
    waits_s = max(0.0, small_s - computed_s - 2 * (n - 1) * LOOPBACK.latency_s)
    moving_s = max(0.0, large_s - small_s)
    bytes_per_s = (n - 1) / n * LARGE_BYTES / moving_s if moving_s else LOOPBACK.bytes_per_s
    return bytes_per_s, LOOPBACK.latency_s, waits_s


def _read() -> dict[int, Link]:
    """What the cache has; nothing where it is missing or makes no sense."""
    try:
        found = {int(count): Link(*map(float, figures)) for count, figures in cache.read(CACHED, "cpu").items()}
    except (ValueError, TypeError, AttributeError):
        return {}
    return found if all(0 < link.bytes_per_s < math.inf and 0 <= link.wait_s < math.inf
                        for link in found.values()) else {}
