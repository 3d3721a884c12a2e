"""Measure how long ranks of this machine wait for each other, with as many ranks as a plan has, and
cache the results.

CPU ranks compute and meet in turns, because they share cores. GPU ranks gather and sum over NCCL,
because only the speed that they reach counts, through bridges, switches, both processors of a host
or its memory.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import DeviceKind
from paceline.cluster.limits import usable_cores
from paceline.cluster.links import LOOPBACK, Link
from paceline.launch.process.context import RankContext
from paceline.launch.process.failure import RankFailed
from paceline.model.cost import cache

if TYPE_CHECKING:
    import torch

CACHED = "links"  # cache document; keys are the number of CPU ranks, or the numbers of the GPUs
MOST_RANKS = 8  # the most CPU ranks that are measured; larger numbers use this result
# How many small and large collectives are timed per round, and the number of rounds.
SMALL, LARGE, ROUNDS = (
    40,
    24,
    2,
)
# Numbers in a small collective. One number takes half as long as 16 or 8,192, because it is not cut
# into parts.
SMALL_NUMBERS = 1024
LARGE_BYTES = 8 * 2**20  # bytes that each rank gathers
# Products of matrices of this side that each rank computes before each collective. The small number
# takes half a millisecond. The large one takes `LATE_AFTER_S`, after which ranks arrive at
# different times.
BUSY_SIDE, FEW_PRODUCTS, MANY_PRODUCTS = 256, 1, 30
SLOWEST = 0.02  # part of the exchanges that does not count, because the machine may have paused
GPU_LARGE_BYTES = 128 * 2**20  # bytes that each GPU gathers, as large as some buckets of gradients
# The part of the cores' time that ranks must get. They get 0.97 to 1.0 if nothing else runs, and
# 0.27 beside two busy processes (2 cores). Figures measured with less are those of a busy machine.
QUIET_SHARE = 0.8
BUSY = "measured while other work had these cores"
TIMEOUT_S = 30.0
GPU_TIMEOUT_S = 90.0  # longer than for CPUs: NCCL first examines the wires, and opens channels


def with_links(cluster: Cluster, *, measure: bool = True) -> Cluster:
    """Return the cluster with the measured wait for a collective, by number of ranks.

    The first call takes some seconds, because ranks are started. Described devices stay as they
    are, and so does a cluster whose ranks can't be started; if those are GPUs, a message says so.
    Figures of a machine that was busy with something else are used, but not cached.

    Args:
        measure: Whether to measure what is not in the cache; use False while ranks are at work.
    """
    devices = cluster.devices
    names = {str(device) for device in devices}
    if (
        cluster.nodes
        or len(names) < max(2, len(devices))
        or len({device.kind for device in devices}) > 1
    ):
        return cluster
    if devices[0].kind == "cuda":
        return _with_gpu_links(cluster, measure=measure)
    links = _read("cpu")
    wanted = _counts(len(devices))
    missing = [count for count in wanted if str(count) not in links]
    if missing and measure:
        with suppress(RankFailed, OSError):
            measured = {str(count): measure_link(cluster, count) for count in missing}
            quiet = {count: link for count, link in measured.items() if link.source != BUSY}
            if quiet:
                _write("cpu", links | quiet)
            if len(quiet) < len(measured):
                print(
                    "note: other work had these cores while the time of messages between ranks was measured, so "
                    "predictions are rougher; it is measured again next time",
                    file=sys.stderr,
                )
            links |= measured
    return replace(
        cluster, links=tuple((count, links[str(count)]) for count in wanted if str(count) in links)
    )


def _with_gpu_links(cluster: Cluster, *, measure: bool) -> Cluster:
    """Measure the links on the first 2, 4, 8 and all GPUs, because other GPUs may be wired
    differently.
    """
    names = {
        count: ",".join(str(device.index) for device in cluster.devices[:count])
        for count in _counts(len(cluster.devices))
    }
    links = _read("cuda")
    missing = [count for count, name in names.items() if name not in links]
    if missing and measure:
        try:
            links |= {names[count]: measure_link(cluster, count) for count in missing}
            _write("cuda", links)
        except (RankFailed, OSError) as error:
            print(
                f"warning: the links between GPUs could not be measured ({str(error).partition(chr(10))[0]}): they "
                f"count as {cluster.link.source}; paceline doctor says more",
                file=sys.stderr,
            )
    return replace(
        cluster,
        links=tuple(
            (count, replace(links[name], source=f"measured between {count} GPUs"))
            for count, name in names.items()
            if name in links
        ),
    )


def measure_link(cluster: Cluster, num_ranks: int) -> Link:
    """Measure the link between CPU ranks that compute and meet in turns, as in training, or between
    the first GPUs.

    Raises:
        RankFailed: a rank failed.
        PacelineError: ranks can't be started from this process.
    """
    from paceline.launch.local.ranks import run_local

    if cluster.devices[0].kind == "cuda":
        return Link(
            *run_local(_gpu_rank_times, cluster.devices[:num_ranks], timeout_s=GPU_TIMEOUT_S)[0]
        )
    devices = [
        replace(cluster.devices[0], index=index, is_limit=False) for index in range(num_ranks)
    ]
    return Link(*run_local(_rank_times, devices, timeout_s=TIMEOUT_S)[0])


def _counts(num_devices: int) -> list[int]:
    """Return 2, 4, 8 and the number of all devices, as far as there are devices."""
    most = min(num_devices, MOST_RANKS)
    return sorted({most, *(count for count in (2, 4, 8) if count <= most)})


def _rank_times(context: RankContext) -> tuple[Any, ...]:
    """Return a link's figures, as this rank sees them, and their source. Collective over the
    default group.

    Each figure is a mean, because a step has many collectives, and one in ten takes several times
    as long as the median. The faster of the rounds counts, because other users of the machine only
    make them slower.
    """
    import torch
    import torch.distributed as dist

    from paceline.launch.collectives.group import all_gather, shares_memory

    n, small = context.world_size, torch.zeros(SMALL_NUMBERS)
    everyone: Any = dist.group.WORLD
    over_gloo = dist.new_group(backend="gloo")
    products = _Products()

    def by_messages(whole: torch.Tensor) -> None:
        for work in [
            dist.broadcast(part, rank, group=over_gloo, async_op=True)
            for rank, part in enumerate(whole.chunk(n))
        ]:
            work.wait()

    def in_memory(whole: torch.Tensor) -> None:
        all_gather(whole, whole.chunk(n)[context.rank])

    wait_s, late_s = _waits_s(lambda: dist.all_reduce(small, group=over_gloo), products)
    wait_s = max(0.0, wait_s - 2 * (n - 1) * LOOPBACK.latency_s)
    memory: tuple[float | None, ...] = (None, 0.0, 0.0)
    if shares_memory(everyone):
        memory = (
            *_waits_s(lambda: dist.all_reduce(small), products),
            _gathered_bytes_per_s(in_memory, everyone),
        )
    bytes_per_s = _gathered_bytes_per_s(by_messages, over_gloo)
    share = torch.tensor(products.share)
    dist.all_reduce(share, dist.ReduceOp.MIN)
    is_quiet = float(share) >= QUIET_SHARE * min(1.0, usable_cores() / n)
    return (
        bytes_per_s,
        LOOPBACK.latency_s,
        wait_s,
        late_s,
        *memory,
        "measured" if is_quiet else BUSY,
    )


class _Products:
    """Computes matrix products, and notes how much of a core's time this rank got for them."""

    def __init__(self) -> None:
        import torch

        self.matrix = torch.ones(BUSY_SIDE, BUSY_SIDE)
        self.cpu_s = self.wall_s = 0.0

    def __call__(self, count: int) -> None:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        for _ in range(count):
            self.matrix @ self.matrix
        self.cpu_s += time.thread_time() - began_cpu_s
        self.wall_s += time.perf_counter() - began_s

    @property
    def share(self) -> float:
        return self.cpu_s / self.wall_s


def _each_s(
    times: int, collective: Callable[[], object], before: Callable[[], object] = lambda: None
) -> float:
    """Return the mean seconds of a collective that follows other work; the slowest runs are left
    out."""
    collective()
    seconds = []
    for _ in range(times):
        before()
        began_s = time.perf_counter()
        collective()
        seconds.append(time.perf_counter() - began_s)
    return statistics.mean(sorted(seconds)[: math.ceil((1 - SLOWEST) * times)])


def _waits_s(
    collective: Callable[[], object], products: Callable[[int], None]
) -> tuple[float, float]:
    """Return the seconds of a collective that follows little work, and what is added after much."""
    few_s, many_s = (
        min(_each_s(SMALL, collective, partial(products, count)) for _ in range(ROUNDS))
        for count in (FEW_PRODUCTS, MANY_PRODUCTS)
    )
    return few_s, max(0.0, many_s - few_s)


def _gathered_bytes_per_s(gather: Callable[[torch.Tensor], object], group: Any) -> float:
    """Return the rate of consecutive gatherings, without the time of an empty one.

    Ranks that compute before them are late by as much as a large one takes.
    """
    from paceline.launch.collectives.group import allocate

    n = group.size()
    large_s, tiny_s = (
        min(_each_s(LARGE, partial(gather, whole)) for _ in range(ROUNDS))
        for whole in (allocate(size, group) for size in (LARGE_BYTES // n * n, n))
    )
    moving_s = max(0.0, large_s - tiny_s)
    return (n - 1) / n * LARGE_BYTES / moving_s if moving_s else LOOPBACK.bytes_per_s


def _gpu_rank_times(context: RankContext) -> tuple[float, float, float]:
    """Return a link's figures, as this rank sees them. Collective over the default group.

    An all-reduce of one number is 2 (n-1) hops. A gathering is n-1 hops and puts (n-1)/n of its
    bytes on each rank's link.
    """
    import torch
    import torch.distributed as dist

    n, device = context.world_size, context.device
    small = torch.zeros(1, device=device)
    whole = torch.zeros(GPU_LARGE_BYTES // 4 // n * n, device=device)
    part = whole.view(n, -1)[context.rank].clone()

    def each_s(times: int, collective: Callable[[], object]) -> float:
        collective()  # opens the connections
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        for _ in range(times):
            collective()
        torch.cuda.synchronize(device)
        return (time.perf_counter() - began_s) / times

    latency_s = each_s(SMALL, lambda: dist.all_reduce(small)) / (2 * (n - 1))
    large_s = each_s(LARGE, lambda: dist.all_gather_into_tensor(whole, part))
    moving_s = max(0.1 * large_s, large_s - (n - 1) * latency_s)
    return (n - 1) * part.nbytes / moving_s, latency_s, 0.0


def _write(kind: DeviceKind, links: Mapping[str, Link]) -> None:
    ordered = sorted(links.items(), key=lambda item: (len(item[0]), item[0]))
    cache.write(CACHED, kind, {name: asdict(replace(link, source="")) for name, link in ordered})


def _read(kind: DeviceKind) -> dict[str, Link]:
    """Return the links in the cache; none if the file is missing or makes no sense."""
    try:
        links = msgspec.convert(cache.read(CACHED, kind), dict[str, Link])
    except msgspec.ValidationError:
        return {}
    return links if all(map(_makes_sense, links.values())) else {}


def _makes_sense(link: Link) -> bool:
    figures = [each for each in astuple(link)[:-1] if each is not None]
    return link.bytes_per_s > 0 and all(0 <= figure < math.inf for figure in figures)
