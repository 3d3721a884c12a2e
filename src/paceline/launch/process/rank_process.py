"""One rank from its first line to its last: threads, log, process group, body, report."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from paceline.base.logs import own_log, set_up_logging
from paceline.base.long_work import long_work
from paceline.cluster.cluster import threads_of_a_rank
from paceline.cluster.devices import Device
from paceline.launch.collectives.group import register
from paceline.launch.process.context import RankContext
from paceline.launch.process.failure import Failure
from paceline.launch.process.fault_policy import FaultPolicy
from paceline.launch.process.malloc import set_up_heap
from paceline.launch.process.memory_limit import limited_to
from paceline.launch.process.own_threads import own_threads_watched
from paceline.launch.process.watchdog import Watchdog, peer_loss

Body = Callable[[RankContext], Any]

_LAST_RESORT_S = 30.0  # beyond twice the patience, after which a collective gives up


def run_rank(
    body: Body,
    context: RankContext,
    device: Device,
    *,
    make_store: Callable[[], dist.Store] | None,
    run_dir: Path | None,
    report: Callable[[Failure], None],
    fault_policy: FaultPolicy,
) -> tuple[Any, Failure | None, Path | None]:
    """Run `body` as one rank of a run. `report` takes a failure that ends the process before this returns.

    Returns:
        The body's result, or its failure; and the rank's log.
    """
    with own_log(run_dir, context.rank) as (terminal, log):
        result, failure = run_body(
            body,
            context,
            device=device,
            make_store=make_store,
            terminal=terminal,
            log=log,
            report=report,
            fault_policy=fault_policy,
        )
    return result, failure, log


def store_in(path: Path, world_size: int) -> Callable[[], dist.Store] | None:
    """Return what makes the store that forked ranks share in a file; None for a single rank."""
    return (lambda: dist.FileStore(str(path), world_size)) if world_size > 1 else None


def set_up_device(device: Device, local_world_size: int) -> torch.device:
    """Take this process's share of the cores, and its device."""
    use_threads(local_world_size)
    torch_device = _claim(device)
    if torch_device.type == "cpu":
        set_up_heap(keep=not device.is_limit)
    return torch_device


def run_body(
    body: Body,
    context: RankContext,
    *,
    device: Device,
    make_store: Callable[[], dist.Store] | None,
    terminal: TextIO,
    log: Path | None,
    report: Callable[[Failure], None],
    fault_policy: FaultPolicy,
) -> tuple[Any, Failure | None]:
    """Run `body` among its peers, watched, held to the device's memory, in a process that is set up.

    Returns:
        The body's result, or its failure.
    """
    try:
        with among_peers(
            context,
            device=device,
            make_store=make_store,
            terminal=terminal,
            report=report,
            fault_policy=fault_policy,
        ):
            return body(context), None
    except BaseException as error:
        failure = peer_loss(context, error)
        _write_trace(error, log)
        return None, failure


@contextlib.contextmanager
def among_peers(
    context: RankContext,
    *,
    device: Device,
    make_store: Callable[[], dist.Store] | None,
    terminal: TextIO,
    report: Callable[[Failure], None],
    fault_policy: FaultPolicy,
) -> Iterator[None]:
    """Be a rank inside the block: among its peers, watched, held to the device's memory."""
    if make_store is not None:
        context.store = make_store()
    set_up_logging(terminal, rank=context.rank, store=context.store)
    long_work.tell = partial(context.board.renew, context.slot)
    with (
        Watchdog(context, report=report),
        own_threads_watched(context, report),
        _process_group(context, device, fault_policy),
        limited_to(device),
    ):
        yield


@contextlib.contextmanager
def _process_group(context: RankContext, device: Device, fault_policy: FaultPolicy) -> Any:
    if context.store is None or not fault_policy.uses_process_group:
        yield
        return
    backend = device.backend or ("cpu:gloo,cuda:nccl" if device.kind == "cuda" else register())
    # The watch speaks first and names the rank; the group's own timeout is the last resort.
    limit_s = 2 * context.timeout_s + _LAST_RESORT_S
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", context.store),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=limit_s),
    )
    dist.all_reduce(
        torch.zeros(1)
    )  # a rank that is done at once must not leave while others still connect to it
    try:
        yield
    finally:
        # A group whose peers are gone can block in its own shutdown.
        if sys.exc_info()[0] is None:
            dist.destroy_process_group()


def use_threads(local_world_size: int) -> None:
    """Cut the cores evenly over this host's ranks; OMP_NUM_THREADS, if set, wins.

    It also makes this fork's thread pool, before several threads ask for it at once: see `base.fork`.
    """
    torch.set_num_threads(threads_of_a_rank(local_world_size))


def _claim(device: Device) -> torch.device:
    torch_device = (
        torch.device(device.kind, device.index) if device.kind == "cuda" else torch.device("cpu")
    )
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    return torch_device


def _write_trace(error: BaseException, log: Path | None) -> None:
    """The whole traceback belongs in the rank's log; the terminal gets the report."""
    if log is None:
        return
    import traceback

    with contextlib.suppress(OSError), open(log, "a", errors="backslashreplace") as file:
        file.write(time.strftime("%Y-%m-%d %H:%M:%S\n"))
        traceback.print_exception(error, file=file)
