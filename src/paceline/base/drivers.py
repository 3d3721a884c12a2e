"""The drivers of GPUs that this machine has, by their device files: torch is not imported to know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Maker:
    """How a maker's GPUs show.

    nodes: any of them is there where the driver is. cards: one of them for each GPU. hidden_by: environment variables
    that leave GPUs out; empty or -1 leaves out all. build: what torch's builds for them are called.
    """

    name: str
    nodes: tuple[str, ...]
    cards: str
    hidden_by: tuple[str, ...]
    build: str


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
