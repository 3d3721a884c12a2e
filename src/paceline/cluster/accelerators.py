"""The GPUs of this machine that torch can use, and the reasons why it can't use others.

The driver's device files are checked first, so a machine without GPUs does not import torch.
Questions to the driver are asked in a fork: ranks are forks of this process, and can't use CUDA if
this process has used it.
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
    """A GPU that no rank can use."""

    reason: str  # what this machine has, and why torch can't use it
    way_out: str  # what to install or to change


# Graphics that are built into a processor of AMD take 512 MiB to 2 GiB of its memory for
# themselves. Cards for training have more. No run is refused because built-in graphics are unused.
_BUILT_IN_BYTES = 4 * 2**30

# Memory of a GPU that the driver's context takes once a process uses the GPU, before the first
# tensor. 621 MiB were measured on an H200 with torch 2.11 for CUDA 13.0. Others report 426 MiB with
# torch 2.10 on an RTX 6000 Ada (unslothai/unsloth-zoo#1053) and "around 400 MB"
# (pytorch/pytorch#109888).
CONTEXT_BYTES = 621 * 2**20
# Memory of kernels, which are loaded when they are first used. Measured as above, after products in
# three precisions, an attention and a convolution.
KERNEL_BYTES = 146 * 2**20
# cuBLAS has a workspace for each thread that launches products: the one of the forward, and
# autograd's for the GPU. torch's allocator hands it out: 32 MiB from Hopper on, and 8 MiB and eight
# blocks of 16 KiB before (CUBLAS_WORKSPACE_CONFIG's defaults in
# aten/src/ATen/cuda/CublasHandlePool.cpp). Measured as above: 64.0 MiB.
WORKSPACES, HOPPER_WORKSPACE_BYTES, WORKSPACE_BYTES = 2, 32 * 2**20, 8 * 2**20 + 8 * 16 * 2**10
_HOPPER = 9  # its compute capability


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The free memory of a GPU for a process that doesn't use it yet."""

    free_bytes: int
    holders: tuple[str, ...] = ()  # processes that hold the rest, in words


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch can use as "cuda"."""

    name: str
    memory_bytes: int
    uuid: str = ""  # empty if torch can't say
    capability: int = 0  # the first number of the compute capability
    multiprocessors: int = 100  # among which the tiles of a matrix product are divided

    @property
    def workspace_bytes(self) -> int:
        """Bytes of cuBLAS' workspaces, which torch's allocator holds once a step has run."""
        return WORKSPACES * (
            HOPPER_WORKSPACE_BYTES if self.capability >= _HOPPER else WORKSPACE_BYTES
        )


def gpus() -> list[Gpu]:
    """Return the GPUs that torch can use as "cuda": NVIDIA's and, in a build for ROCm, AMD's."""
    return list(_usable())


def uuids() -> list[str]:
    """Return the UUID of each GPU of `gpus`; empty if torch can't say."""
    return [gpu.uuid for gpu in _usable()]


@cache
def cards() -> tuple[nvml.Card | None, ...]:
    """Return NVML's report on each GPU of `gpus`, as of the first call; None for a GPU that NVML
    does not know.
    """
    seen = nvml.read() if _usable() else None
    return tuple(seen.find(uuid) if seen is not None else None for uuid in uuids())


def identity() -> str:
    """Return a text of all that measurements on the GPUs depend on: their names, the driver and
    their links.
    """
    names = [gpu.name for gpu in gpus()]
    return f"{names} driver {driver_version()} wires {[wire and wire.source for wire in topology.wires(cards())]}"


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None if there is no such driver."""
    file = Path("/proc/driver/nvidia/version")
    version = re.search(r"\d+\.\d+[.\d]*", file.read_text()) if file.exists() else None
    return version and version[0]


def room(index: int) -> FreeMemory:
    """Return the memory that a GPU has free now, by NVML's report or else by CUDA's.

    CUDA is asked in a fork, and only once in this process, because each such question makes and
    ends a context.
    """
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
    """Explain why no rank can use a GPU that is here and that nobody has hidden; None if there is
    no such GPU.
    """
    if gpus():
        return None
    for maker in MAKERS:
        if drivers.has_driver_of(maker) and not _hidden(maker):
            return _why_not(maker)
    return _intel() if "xpu" in _torch_version() else None


def unused() -> str | None:
    """Explain why runs here train on the CPU although there is a GPU; None if there is no such GPU.

    Such a GPU is in each Mac with a processor of Apple's own. torch calls it "mps".
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
    """Return the bytes of each AMD GPU's own memory; empty if the driver doesn't say."""
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
    """Explain why a user can't ask for a kind of device; None for words that name no kind that
    torch knows.

    Args:
        kind: torch's name of the kind, or its maker's name for it.
    """
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

    def look() -> tuple[Gpu, ...]:
        import torch

        if not torch.cuda.is_available():
            return ()
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return tuple(
            Gpu(
                device.name,
                device.total_memory,
                str(getattr(device, "uuid", "")),
                device.major,
                device.multi_processor_count,
            )
            for device in devices
        )

    seen: tuple[Gpu, ...] = in_a_fork(look) if forks_can_use_cuda() else look()
    return seen


@cache
def _free_bytes() -> tuple[int, ...]:
    """Return the free bytes of each GPU, by CUDA, without a context of this process.

    A GPU that can't be used now counts as free, and its rank will report the reason.
    """
    from paceline.base.fork import forks_can_use_cuda, in_a_fork

    def look() -> tuple[int, ...]:
        import torch

        def free(index: int, total: int) -> int:
            try:
                return min(total, torch.cuda.mem_get_info(index)[0] + CONTEXT_BYTES)
            except Exception:
                return total

        return tuple(free(index, gpu.memory_bytes) for index, gpu in enumerate(gpus()))

    free_bytes: tuple[int, ...] = in_a_fork(look) if forks_can_use_cuda() else look()
    return free_bytes


def _failure() -> str:
    """Return torch's message when it begins to use the driver."""
    from paceline.base.fork import in_a_fork

    def begin() -> str:
        import torch

        try:
            torch.cuda.init()
        except Exception as error:
            return str(error).splitlines()[0]
        return "it finds no GPU"

    return str(in_a_fork(begin))
