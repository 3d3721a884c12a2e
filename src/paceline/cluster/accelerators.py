"""Which GPUs of this machine torch can use, and why it can't use the others.

The driver's device files are checked first, so a machine without GPUs does not import torch. Questions to the driver
are asked in a fork: ranks are forks of this process, and can't use CUDA if this process has used it.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from paceline.base import drivers
from paceline.base.drivers import MAKERS, Maker
from paceline.cluster import nvml, topology

INSTALL = "https://pytorch.org/get-started/locally has the command"


@dataclass(frozen=True, slots=True)
class Unusable:
    """A GPU that no rank can use.

    reason: what is here, and why torch can't use it. way_out: what to install or to change.
    """

    reason: str
    way_out: str


# Graphics that are built into a processor of AMD take 512 MiB to 2 GiB of its memory for themselves; cards that are
# trained on have more. No run is refused for the sake of the former.
_BUILT_IN_BYTES = 4 * 2**30

# Of a GPU, once a process uses it, before the first tensor: the driver's context. 621 MiB were measured on an H200 with
# torch 2.11 for CUDA 13.0. 426 MiB with torch 2.10 on an RTX 6000 Ada (unslothai/unsloth-zoo#1053), "around 400 MB"
# (pytorch/pytorch#109888).
CONTEXT_BYTES = 621 * 2**20
# Of kernels, which are loaded when they are first used: measured as above, after products in three precisions, an
# attention and a convolution.
KERNEL_BYTES = 146 * 2**20
# cuBLAS has a workspace for each thread that launches products: the one of the forward, and autograd's for the GPU.
# torch's allocator hands it out: 32 MiB from Hopper on, and 8 MiB and eight blocks of 16 KiB before
# (CUBLAS_WORKSPACE_CONFIG's defaults in aten/src/ATen/cuda/CublasHandlePool.cpp). Measured as above: 64.0 MiB.
WORKSPACES, HOPPER_WORKSPACE_BYTES, WORKSPACE_BYTES = 2, 32 * 2**20, 8 * 2**20 + 8 * 16 * 2**10
_HOPPER = 9  # its compute capability


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What a GPU has free for a process that doesn't use it yet, and who has the rest, in words."""

    free_bytes: int
    holders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch can use as "cuda".

    uuid: empty where torch can't say. capability: the first number of it. multiprocessors: that tiles of a product are
    dealt out to.
    """

    name: str
    memory_bytes: int
    uuid: str = ""
    capability: int = 0
    multiprocessors: int = 100

    @property
    def workspace_bytes(self) -> int:
        """Of cuBLAS, which torch's allocator hands out once a step has run."""
        return WORKSPACES * (
            HOPPER_WORKSPACE_BYTES if self.capability >= _HOPPER else WORKSPACE_BYTES
        )


def gpus() -> list[Gpu]:
    """Those that torch can use as "cuda", NVIDIA's and, in a build for ROCm, AMD's."""
    return list(_usable())


def uuids() -> list[str]:
    """Of each GPU of `gpus`; empty where torch can't say."""
    return [gpu.uuid for gpu in _usable()]


@cache
def cards() -> tuple[nvml.Card | None, ...]:
    """What NVML says of each GPU of `gpus` when it is first asked; None where it says nothing."""
    seen = nvml.read() if _usable() else None
    return tuple(seen.find(uuid) if seen is not None else None for uuid in uuids())


def identity() -> str:
    """What figures that were measured on the GPUs depend on: their names, the driver, and how they are wired."""
    wires = [
        topology.between(card, other) if card is not None and other is not None else None
        for number, card in enumerate(cards())
        for other in cards()[:number]
    ]
    names = [gpu.name for gpu in gpus()]
    return f"{names} driver {driver_version()} wires {[wire and wire.name for wire in wires]}"


def driver_version() -> str | None:
    """Of NVIDIA's driver."""
    file = Path("/proc/driver/nvidia/version")
    version = re.search(r"\d+\.\d+[.\d]*", file.read_text()) if file.exists() else None
    return version and version[0]


def room(index: int) -> FreeMemory:
    """What a GPU has free now, by NVML; without it as CUDA says in a fork, which is asked once a process, because each
    look at a GPU there makes and ends a context."""
    card = nvml.read_memory(uuids()[index])
    if card is not None and card.total_bytes:
        return FreeMemory(card.free_bytes, tuple(map(str, card.holders)))
    return FreeMemory(_free_bytes()[index])


def _usable() -> tuple[Gpu, ...]:
    return _seen() if drivers.has_driver() else ()


def has_gpus() -> bool:
    """Whether torch can use GPUs on this machine as "cuda"."""
    return bool(gpus())


def unusable() -> Unusable | None:
    """Why a GPU that is here, and that nobody has hidden, is of no use; None if there is no such GPU."""
    if gpus():
        return None
    for maker in MAKERS:
        if drivers.has_driver_of(maker) and not _hidden(maker):
            return _why_not(maker)
    return _intel() if "xpu" in _torch_version() else None


def unused() -> str | None:
    """Why a GPU that is here, and that no run is refused for, is not used; None if there is no such GPU.

    Each Mac with a processor of Apple's own has one, which torch calls "mps".
    """
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return None
    apples = refusal("mps")
    assert apples is not None
    return f"this Mac's GPU is not used: {apples.reason}"


def _why_not(maker: Maker) -> Unusable | None:
    if not any(Path("/dev").glob(maker.cards)):
        return None  # a driver without a card, as in a container that was given none; /dev/dxg is there for any maker's
    if (
        maker.name == "AMD"
        and (memories_bytes := _amd_memories_bytes())
        and max(memories_bytes) < _BUILT_IN_BYTES
    ):
        return None
    import torch

    built_for = torch.version.cuda if maker.name == "NVIDIA" else torch.version.hip
    if built_for is None:
        return Unusable(
            f"this machine has {maker.name}'s driver, and torch {torch.__version__} is not built for it",
            f"install torch's {maker.build} build: {INSTALL}",
        )
    return Unusable(
        f"this machine has {maker.name}'s driver, and torch, built for {maker.build} {built_for}, can't "
        f"use it: {_failure()}",
        "update the driver, or install a torch that is built for an older one",
    )


def _amd_memories_bytes() -> list[int]:
    """Of each GPU that AMD's driver has, its own memory; empty where the driver doesn't say."""
    return [
        int(file.read_text())
        for file in Path("/sys/class/drm").glob("card*/device/mem_info_vram_total")
    ]


def _intel() -> Unusable | None:
    from paceline.base.fork import in_a_fork

    def look() -> str | None:
        import torch

        return torch.xpu.get_device_name(0) if torch.xpu.is_available() else None

    name = in_a_fork(look)
    return (
        None
        if name is None
        else Unusable(
            f"this machine has Intel's GPU {name}, on which Paceline does not train yet",
            "it trains on NVIDIA's GPUs, and on AMD's with torch's ROCm build",
        )
    )


def refusal(kind: str) -> Unusable | None:
    """Why a kind of device that torch knows, or its maker's name for it, can't be asked for; None for other words."""
    if kind in ("rocm", "hip", "gpu"):
        return Unusable(
            f"torch has no device '{kind}:0'", "GPUs of NVIDIA and AMD are both called cuda: cuda:0"
        )
    if kind in ("xpu", "mps", "hpu", "npu", "mlu", "musa", "privateuseone"):
        return Unusable(
            f"Paceline does not train on '{kind}' devices yet",
            "cuda:0, or cpu:0 to train on the CPU",
        )
    return None


def _hidden(maker: Maker) -> bool:
    return any(
        re.fullmatch(r"\s*(-1.*)?", os.environ[name])
        for name in maker.hidden_by
        if name in os.environ
    )


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


@cache
def _seen() -> tuple[Gpu, ...]:
    from paceline.base.fork import forks_can_use_cuda, in_a_fork

    def look() -> list[tuple[str, int, str, int, int]]:
        import torch

        if not torch.cuda.is_available():
            return []
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [
            (
                device.name,
                device.total_memory,
                str(getattr(device, "uuid", "")),
                device.major,
                device.multi_processor_count,
            )
            for device in devices
        ]

    seen = in_a_fork(look) if forks_can_use_cuda() else look()
    return tuple(Gpu(*figures) for figures in seen)


@cache
def _free_bytes() -> tuple[int, ...]:
    """Of each GPU, before this process's own context; all of one that can't be used now: its rank will say why."""
    from paceline.base.fork import forks_can_use_cuda, in_a_fork

    def look() -> list[int]:
        import torch

        def free(index: int, total: int) -> int:
            try:
                return min(total, torch.cuda.mem_get_info(index)[0] + CONTEXT_BYTES)
            except Exception:
                return total

        return [free(index, gpu.memory_bytes) for index, gpu in enumerate(gpus())]

    return tuple(in_a_fork(look) if forks_can_use_cuda() else look())


def _failure() -> str:
    """What torch says where it begins to use the driver."""
    from paceline.base.fork import in_a_fork

    def begin() -> str:
        import torch

        try:
            torch.cuda.init()
        except Exception as error:
            return str(error).splitlines()[0]
        return "it finds no GPU"

    return str(in_a_fork(begin))
