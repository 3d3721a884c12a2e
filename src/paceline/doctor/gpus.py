"""Problems with this machine's GPUs, reported before a run meets them.

CUDA is asked in forks of this process, with a deadline. NVML is asked in this process. Verdicts are
functions of the answers, so they can be tested without a GPU.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from paceline.base.errors import PacelineError
from paceline.base.fork import in_a_fork
from paceline.cluster import nvml
from paceline.cluster.accelerators import driver_version, gpus, room, unusable, unused, uuids
from paceline.cluster.nvml import Card
from paceline.doctor.gpu_findings import (
    NCCL_TIMEOUT_S,
    Outcome,
    SeenGpus,
    judge_driver,
    judge_gpus,
    judge_health,
    judge_links,
    judge_memory,
    judge_nccl,
    judge_visible,
)

LOOK_TIMEOUT_S = 60.0
COPIED_BYTES = 256 * 2**20
COPIES = 5  # for each pair; the median counts


def look() -> SeenGpus:
    """Ask torch for its report, in a fork.

    Raises:
        RuntimeError: torch gave no answer in time, or failed.
    """
    seen: SeenGpus = in_a_fork(_look, timeout_s=LOOK_TIMEOUT_S)
    return seen


def _look() -> SeenGpus:
    import torch

    def failure(index: int) -> str:
        try:
            torch.ones(8, device=f"cuda:{index}").sum().item()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return ""

    numbers = range(torch.cuda.device_count())
    return SeenGpus(
        torch.version.cuda or "",
        tuple(torch.cuda.get_arch_list()),
        tuple(map(torch.cuda.get_device_capability, numbers)),
        tuple(
            tuple(
                first == other or torch.cuda.can_device_access_peer(first, other)
                for other in numbers
            )
            for first in numbers
        ),
        tuple(map(failure, numbers)),
    )


# --- Checks -----------------------------------------------------------------------------------------------------


def check_gpus() -> Outcome:
    """Check each GPU."""
    if idle := unusable():
        return "bad", idle.reason, idle.way_out
    if not gpus():
        return "ok", f"{unused() or 'none that Paceline can use'}; training runs on the CPU"
    return judge_gpus(gpus(), look())


def check_driver() -> Outcome:
    import torch

    cards = nvml.read()
    return judge_driver(
        cards.driver if cards else driver_version(),
        cards.cuda if cards else None,
        torch.version.cuda or "",
    )


def check_visible() -> Outcome:
    return judge_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), nvml.read())


def check_memory() -> Outcome:
    if not gpus():
        return "ok", "no GPU that torch can use"
    free = [
        (memory.free_bytes, gpu.memory_bytes, memory.holders)
        for memory, gpu in ((room(index), gpu) for index, gpu in enumerate(gpus()))
    ]
    return judge_memory(free)


def check_health() -> Outcome:
    return judge_health(_cards())


def check_links() -> Outcome:
    """Check copies between each two GPUs."""
    if len(gpus()) < 2:
        return "ok", "none: there are not two GPUs"
    copies = in_a_fork(_copies, timeout_s=LOOK_TIMEOUT_S)
    return judge_links(
        look().access,
        _cards(),
        {(first, other): bytes_per_s for first, other, bytes_per_s in copies},
    )


def check_nccl() -> Outcome:
    """Check NCCL with a real all-reduce between ranks that are forks."""
    import torch.distributed

    from paceline.cluster.cluster import Cluster
    from paceline.launch.local.ranks import run_local

    if not torch.distributed.is_nccl_available():
        return (
            "bad",
            "this build of torch has none, and GPUs talk through it",
            "install the CUDA build from pip",
        )
    version = str(in_a_fork(_nccl_version, timeout_s=LOOK_TIMEOUT_S))
    if len(gpus()) < 2:
        return "ok", f"{version}; one GPU needs none"
    devices = Cluster.local("cuda:0-1", whole=True).devices
    began_s = time.monotonic()
    try:
        # A fork around the ranks: it can be ended whatever they are stuck in, and they end with it.
        in_a_fork(
            lambda: run_local(_sum, devices, timeout_s=NCCL_TIMEOUT_S),
            timeout_s=NCCL_TIMEOUT_S + 30,
        )
    except (PacelineError, RuntimeError) as error:
        return judge_nccl(version, str(error.args[0]), 0.0)
    return judge_nccl(version, "", time.monotonic() - began_s)


def _cards() -> list[Card | None]:
    """Return the card of each GPU that torch can use, or all cards of the machine if it can use
    none.
    """
    cards = nvml.read()
    if cards is None:
        return [None for _ in uuids()]
    return [cards.find(uuid) for uuid in uuids()] or list(cards.cards)


def _nccl_version() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))


def _copies() -> list[tuple[int, int, float]]:
    """Measure copies between GPUs: the source, the target and the median bytes a second.

    A pair is left out if one of its GPUs has no room for the copies.
    """
    import torch

    rates = []
    count = torch.cuda.device_count()
    has_room = [torch.cuda.mem_get_info(index)[0] > 4 * COPIED_BYTES for index in range(count)]
    for first in range(count):
        for other in range(first + 1, count):
            if has_room[first] and has_room[other]:
                rates.append((first, other, COPIED_BYTES / _copy_s(first, other)))
    return rates


def _copy_s(first: int, other: int) -> float:
    import torch

    source = torch.zeros(COPIED_BYTES // 4, device=f"cuda:{first}")
    target = torch.empty_like(source, device=f"cuda:{other}")
    times_s = []
    for _ in range(COPIES + 1):
        began_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(first)
        torch.cuda.synchronize(other)
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s[1:])


CHECKS = {
    "GPU driver": check_driver,
    "CUDA_VISIBLE_DEVICES": check_visible,
    "GPU memory": check_memory,
    "GPU health": check_health,
    "GPU links": check_links,
}


def _sum(context: Any) -> None:
    """Do one rank's part of the all-reduce. Collective over the default group."""
    import torch
    import torch.distributed as dist

    value = torch.full((1024,), context.rank + 1.0, device=context.device)
    dist.all_reduce(value)
    if (total := float(value.sum())) != 3.0 * 1024:
        raise RuntimeError(f"1 and 2 were summed to {total / 1024:g}")
