"""Checks of this machine: its equipment for training, and problems with it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.base.drivers import has_driver
from paceline.base.errors import PacelineError
from paceline.base.tables import wrapped
from paceline.cluster.accelerators import has_gpus
from paceline.cluster.limits import free_memory_bytes, usable_cores, usable_memory_bytes
from paceline.launch.process.failure import RankFailed

if TYPE_CHECKING:
    from paceline.launch.process.context import RankContext

MIN_TORCH = (2, 11)
PROBE_TIMEOUT_S = 30.0
PROBE_BYTES = 16 * 2**20  # one message of the bandwidth probe: a large gradient bucket

GIB = 2**30
# Docker gives containers 64 MiB of /dev/shm by default; loader workers pass batches through it.
MIN_SHARED_MEMORY_BYTES = GIB // 2
MIN_FREE_MEMORY_BYTES = 2 * GIB
MIN_FREE_DISK_BYTES = 2 * GIB
MIN_OPEN_FILES = 1024

# The extra that brings each package; none is needed to train.
_OPTIONAL_PACKAGES = {
    "jinja2": "report",
    "optuna": "search",
    "transformers": "transformers",
    "tensorboard": "tensorboard",
    "ray": "ray",
    "scikit-learn": "examples",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    # "warn": works, but slower or not everywhere. "bad": training will fail or miss a device.
    status: Literal["ok", "warn", "bad"]
    detail: str
    fix: str | None = None  # what to do about it; None if there is nothing to do

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as a document that JSON can hold."""
        return asdict(self)


def examine() -> list[Finding]:
    """Run all checks once.

    This takes some seconds, because processes are started and send data to each other, on CPUs and,
    if there are two, on GPUs.
    """
    from paceline.doctor.gpus import CHECKS

    checks: dict[str, Callable[[], tuple[Any, ...]]] = {}
    for name, check in _CHECKS.items():
        checks[name] = check
        if name == "GPUs" and has_driver():
            checks |= CHECKS
    return [_guarded(name, check) for name, check in checks.items()]


def describe(findings: list[Finding]) -> str:
    """Return the findings as text, one a line, each with its fix below."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        start = f"{finding.status:<4}  {finding.name:<{width}}  "
        lines.append(wrapped(start + finding.detail, len(start)))
        if finding.fix:
            lines.append(wrapped(f"{'':<{len(start)}}-> {finding.fix}", len(start) + 3))
    return "\n".join(lines)


def _guarded(name: str, check: Callable[[], tuple[Any, ...]]) -> Finding:
    try:
        return Finding(name, *check())
    except (
        Exception
    ) as error:  # a check that can't look is a finding too, and must not hide the others
        return Finding(name, "bad", f"can't be examined: {type(error).__name__}: {error}")


# --- This process -----------------------------------------------------------------------------------------------

# A check returns the status, the detail and, where there is something to do, the fix.
_Outcome = tuple[str, str] | tuple[str, str, str]


def _python() -> _Outcome:
    return (
        "ok",
        f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}",
    )


def _torch() -> _Outcome:
    version = _version("torch")
    wanted = ".".join(map(str, MIN_TORCH))
    if version is None:
        return "bad", "torch is not installed", f'pip install "torch>={wanted}"'
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_TORCH:
        return "bad", f"torch {version} is too old", f'pip install "torch>={wanted}"'
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    return "ok", f"{torch.__version__}, built for {build}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> _Outcome:
    return "ok", ", ".join(
        f"{package} {_version(package) or 'not installed'} ({use})"
        for package, use in _OPTIONAL_PACKAGES.items()
    )


def _cores() -> _Outcome:
    cores, present, threads = usable_cores(), os.cpu_count() or 1, os.environ.get("OMP_NUM_THREADS")
    detail = f"{cores} usable" + (f" of {present}" if present != cores else "")
    if threads is None:
        return "ok", f"{detail}; OMP_NUM_THREADS is not set"
    detail += f"; OMP_NUM_THREADS={threads}"
    if not threads.isdigit() or int(threads) < 1:
        return "bad", detail, "set OMP_NUM_THREADS to a whole number of at least 1, or unset it"
    if int(threads) > cores:
        return (
            "warn",
            detail,
            f"more threads than cores slow every rank down: set OMP_NUM_THREADS to at most {cores}",
        )
    return "ok", detail


def _memory() -> _Outcome:
    import psutil

    machine_bytes, usable_bytes, free_bytes = (
        psutil.virtual_memory().total,
        usable_memory_bytes(),
        free_memory_bytes(),
    )
    limited = (
        f", limited by a cgroup from {_gib(machine_bytes)}" if usable_bytes < machine_bytes else ""
    )
    detail = f"{_gib(usable_bytes)}{limited}, {_gib(free_bytes)} free"
    if free_bytes < MIN_FREE_MEMORY_BYTES:
        return (
            "warn",
            detail,
            "end other programs, or raise the container's limit: a rank starts at some 0.3 GiB",
        )
    return "ok", detail


def _shared_memory() -> _Outcome:
    path = Path("/dev/shm")
    if not path.is_dir():
        return "ok", f"this system has no {path}"
    total_bytes = shutil.disk_usage(path).total
    if total_bytes < MIN_SHARED_MEMORY_BYTES:
        return (
            "warn",
            f"{path} has {_gib(total_bytes)}",
            "loader workers pass batches through it: start the container with --shm-size=1g or more",
        )
    return "ok", f"{path} has {_gib(total_bytes)}"


def _open_files() -> _Outcome:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        return (
            "warn",
            f"{soft} may be open at once",
            f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}",
        )
    return "ok", f"{'any number' if soft == resource.RLIM_INFINITY else soft} may be open at once"


def _disk() -> _Outcome:
    folder = Path.cwd()
    free_bytes = shutil.disk_usage(folder).free
    detail = f"{_gib(free_bytes)} free in {folder}"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"paceline")
    except OSError as error:
        return (
            "bad",
            f"{folder} can't be written: {error.strerror}",
            "work in another folder, or give --run DIR",
        )
    if free_bytes < MIN_FREE_DISK_BYTES:
        return "warn", detail, "checkpoints go there: make room, or give --run DIR"
    return "ok", detail


# --- Devices ----------------------------------------------------------------------------------------------------


def _gpus() -> _Outcome:
    from paceline.doctor.gpus import check_gpus

    return check_gpus()


def _nccl() -> _Outcome:
    from paceline.doctor.gpus import check_nccl

    return check_nccl() if has_gpus() else ("ok", "not needed without GPUs")


# --- Ranks and hosts --------------------------------------------------------------------------------------------


def _gloo() -> _Outcome:
    """Check gloo: two processes reduce tensors over loopback, as ranks on one machine do."""
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        return (
            "bad",
            "this build of torch has none, and ranks on CPUs talk through it",
            "install torch from pip",
        )
    from paceline.cluster.cluster import Cluster
    from paceline.launch.local.ranks import run_local

    devices = [replace(device, backend="gloo") for device in Cluster.local("cpu:0-1").devices]
    try:
        measured = run_local(probe, devices, timeout_s=PROBE_TIMEOUT_S)[0]
    except RankFailed as failed:
        return (
            "bad",
            f"two processes could not all-reduce: {failed.failure.message.splitlines()[0]}",
            "see whether a firewall or the sandbox stops connections over the loopback interface",
        )
    return "ok", (
        f"2 processes over loopback: {measured['latency_s'] * 1e6:,.0f} us a small all-reduce, "
        f"{measured['bytes_per_s'] / 1e9:.2f} GB/s for {PROBE_BYTES // 2**20} MiB"
    )


def probe(context: RankContext) -> dict[str, float]:
    """Measure all-reduces as one of the two ranks of the gloo check. Collective.

    The bandwidth is the bytes of the tensor divided by the time of one all-reduce, because on two
    ranks a ring moves exactly these bytes through each rank.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    small, large = torch.ones(1), torch.zeros(PROBE_BYTES // 4)
    latency_s, transfer_s = _all_reduce_s(small, repeats=50), _all_reduce_s(large, repeats=5)
    summed = torch.full((4,), context.rank + 1.0)
    dist.all_reduce(summed)
    if summed.tolist() != [3.0] * 4:
        raise RuntimeError(f"the sum of 1 and 2 over two ranks is {summed.tolist()}")
    return {"latency_s": latency_s, "bytes_per_s": PROBE_BYTES / transfer_s}


def _all_reduce_s(tensor: Any, *, repeats: int) -> float:
    """Return the median seconds of an all-reduce, after one that isn't counted.

    Collective over the default group.
    """
    import torch.distributed as dist

    times_s = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s[1:])


def _interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface that is up, IPv4 only."""
    import psutil

    states = psutil.net_if_stats()
    ipv4 = {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    return {name: addresses for name, addresses in ipv4.items() if addresses}


def _host_name() -> _Outcome:
    """Check the address to which the host name resolves.

    gloo listens on this address, and other hosts can't reach a loopback address.
    """
    interfaces = _interfaces()
    listed = (
        ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in interfaces.items())
        or "none"
    )
    outward = [
        name for name, addresses in interfaces.items() if not addresses[0].startswith("127.")
    ]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen and (unknown := [name for name in chosen.split(",") if name not in interfaces]):
        return (
            "bad",
            f"GLOO_SOCKET_IFNAME names {', '.join(unknown)}, which is not up here; interfaces: {listed}",
            "set it to an interface of this host, or unset it",
        )
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = None
    detail = f"{name} resolves to {address or 'nothing'}; interfaces: {listed}"
    if chosen:
        return "ok", f"GLOO_SOCKET_IFNAME={chosen}; {detail}"
    if outward and (address is None or address.startswith("127.")):
        return (
            "warn",
            detail,
            f"fine on one host; on several, export GLOO_SOCKET_IFNAME={outward[0]} on each",
        )
    return "ok", detail


def _launcher() -> _Outcome:
    from paceline.launch.hosts import environment

    try:
        launched = environment.current()
    except PacelineError as error:
        return "bad", error.args[0], error.hint or "unset RANK and WORLD_SIZE"
    if launched is not None:
        return (
            "ok",
            f"rank {launched.rank} of {launched.world_size}, started by {launched.launcher}",
        )
    leftover = [
        name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if name in os.environ
    ]
    if leftover:
        return (
            "warn",
            f"{', '.join(leftover)} set, but no launcher is recognised",
            f"unset {' '.join(leftover)}",
        )
    return "ok", "none: ranks are started as local processes"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:,.0f} MiB"


_CHECKS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "python": _python,
    "torch": _torch,
    "optional packages": _packages,
    "cores": _cores,
    "memory": _memory,
    "shared memory": _shared_memory,
    "open files": _open_files,
    "disk": _disk,
    "GPUs": _gpus,
    "NCCL": _nccl,
    "gloo": _gloo,
    "host name": _host_name,
    "launcher": _launcher,
}
