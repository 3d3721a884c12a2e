"""The GPU drivers of this machine, found by their device files, without an import of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Maker:
    """A maker of GPUs, and the traces of its driver and its GPUs on a machine."""

    name: str
    nodes: tuple[str, ...]  # files of the driver; one of them suffices to show that it is there
    cards: str  # a pattern below /dev that matches one file for each GPU
    hidden_by: tuple[str, ...]  # variables that leave GPUs out; empty or -1 leaves out all
    build: str  # the name of torch's builds for these GPUs


MAKERS = (
    Maker(
        "NVIDIA",
        ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia"),
        "nvidia[0-9]*",
        ("CUDA_VISIBLE_DEVICES",),
        "CUDA",
    ),
    Maker(
        "AMD",
        ("/dev/kfd",),
        "dri/renderD*",
        ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        "ROCm",
    ),
)


def has_driver() -> bool:
    """Whether this machine has a driver of NVIDIA or AMD."""
    return any(map(has_driver_of, MAKERS))


def has_driver_of(maker: Maker) -> bool:
    return any(Path(node).exists() for node in maker.nodes)
