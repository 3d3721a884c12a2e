"""What NVIDIA's management library, NVML, reports about the cards of this machine.

NVML does not start CUDA, so this process may ask it before it forks ranks. It comes with the driver; Python reaches it
through the package nvidia-ml-py (the extra `gpu`). NVML numbers cards by their places on the bus and
ignores CUDA_VISIBLE_DEVICES, so cards and CUDA's devices are matched by their UUIDs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SWITCH = (
    "switch"  # the far end of a link that goes to an NVSwitch, which brings it to every other card
)
# Why a card runs slower than it could: bits of nvmlDeviceGetCurrentClocksEventReasons. Its power limit is left out: a
# card that computes is always near it.
_SLOWED = {
    0x8: "a hardware slowdown",
    0x20: "heat, by the driver",
    0x40: "heat, by the card",
    0x80: "the power supply's brake",
}


@dataclass(frozen=True, slots=True)
class CardProcess:
    """A process with memory on a card. num_bytes: None where NVML can't say."""

    pid: int
    name: str
    num_bytes: int | None

    def __str__(self) -> str:
        memory = "" if self.num_bytes is None else f", {self.num_bytes / 2**30:.1f} GiB"
        return f"process {self.pid}{self.name and f' ({self.name})'}{memory}"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or one of the slices (MIG) that it is cut into.

    bus_id: empty of a slice. total_bytes, free_bytes: of its memory; what this process has of it counts as free.
    holders: other processes with memory there.
    slices: of a card that is cut. is_cut: whether MIG is switched on.
    pcie_generation: the best that the card and its slot can do together; an idle card uses less. pcie_lanes,
        most_pcie_lanes: in use, and that both have. 0 where nobody knows.
    nvlinks: how many lead to which card, by its bus_id, or to SWITCH. nvlink_bytes_per_s: one of them, one direction.
    ecc_errors: that could not be corrected since the driver was loaded; None without ECC.
    """

    index: int
    name: str
    uuid: str
    bus_id: str = ""
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    free_bytes: int = 0
    holders: tuple[CardProcess, ...] = ()
    is_cut: bool = False
    slices: tuple[Card, ...] = ()
    pcie_generation: int = 0
    pcie_lanes: int = 0
    most_pcie_lanes: int = 0
    nvlinks: tuple[tuple[str, int], ...] = ()
    nvlink_bytes_per_s: float = 0.0
    ecc_errors: int | None = None
    slowed_by: tuple[str, ...] = ()
    is_persistent: bool | None = None

    def num_nvlinks(self, other: Card) -> int:
        """That lead to another card, directly or through switches."""
        links, other_links = dict(self.nvlinks), dict(other.nvlinks)
        return links.get(other.bus_id, 0) or min(links.get(SWITCH, 0), other_links.get(SWITCH, 0))


@dataclass(frozen=True, slots=True)
class Cards:
    """All cards of the machine. driver: its version. cuda: the newest version of CUDA that the driver runs."""

    driver: str
    cuda: tuple[int, int]
    cards: tuple[Card, ...]

    def find(self, uuid: str) -> Card | None:
        """A card or a slice by its UUID, with or without NVIDIA's prefix."""

        def plain(text: str) -> str:
            return text.removeprefix("GPU-").removeprefix("MIG-").lower()

        everything = [device for card in self.cards for device in (card, *card.slices)]
        return next(
            (device for device in everything if uuid and plain(device.uuid) == plain(uuid)), None
        )


def read() -> Cards | None:
    """Ask NVML everything; None where the package or the library is missing, or the driver doesn't answer."""
    return _with_nvml(_read)


def read_memory(uuid: str) -> Card | None:
    """One card's or slice's memory, which is quicker; other figures stay at their defaults."""

    def ask(nvml: Any) -> Card | None:
        for index in range(nvml.nvmlDeviceGetCount()):
            card = _with_memory(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index)
            if same := Cards("", (0, 0), (card,)).find(uuid):
                return same
        return None

    return _with_nvml(ask)


def _with_nvml(ask: Callable[[Any], Any]) -> Any:
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return ask(nvml)
    except nvml.NVMLError:
        return None
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _read(nvml: Any) -> Cards:
    version = nvml.nvmlSystemGetCudaDriverVersion()
    cards = [
        _card(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index)
        for index in range(nvml.nvmlDeviceGetCount())
    ]
    return Cards(
        _text(nvml.nvmlSystemGetDriverVersion()),
        (version // 1000, version % 1000 // 10),
        tuple(cards),
    )


def _text(value: Any) -> str:
    return (
        value.decode() if isinstance(value, bytes) else str(value)
    )  # bytes in older versions of the package


def _with_memory(nvml: Any, handle: Any, index: int) -> Card:
    query = _query_of(nvml)
    memory = query(nvml.nvmlDeviceGetMemoryInfo, handle)
    is_cut = (query(nvml.nvmlDeviceGetMigMode, handle) or [0])[0] == 1
    slices = (
        [
            query(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            for number in range(query(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
        ]
        if is_cut
        else []
    )
    holders, own_bytes = _holders(nvml, handle)
    return Card(
        index,
        _text(nvml.nvmlDeviceGetName(handle)),
        _text(nvml.nvmlDeviceGetUUID(handle)),
        total_bytes=memory.total if memory else 0,
        free_bytes=memory.free + own_bytes if memory else 0,
        holders=holders,
        is_cut=is_cut,
        slices=tuple(_with_memory(nvml, part, index) for part in slices if part is not None),
    )


def _holders(nvml: Any, handle: Any) -> tuple[tuple[CardProcess, ...], int]:
    """Other processes that compute or draw there, the one with most first; and what this one has."""
    query, holders, own_bytes = _query_of(nvml), {}, 0
    for ask in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        for process in query(ask, handle) or ():
            if process.pid == os.getpid():
                own_bytes = process.usedGpuMemory or 0
            else:
                name = query(nvml.nvmlSystemGetProcessName, process.pid)
                holders[process.pid] = CardProcess(
                    process.pid, Path(_text(name)).name if name else "", process.usedGpuMemory
                )
    return tuple(sorted(holders.values(), key=lambda holder: -(holder.num_bytes or 0))), own_bytes


def _card(nvml: Any, handle: Any, index: int) -> Card:
    query = _query_of(nvml)
    reasons = query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    pci = query(nvml.nvmlDeviceGetPciInfo, handle)
    links, bytes_per_s = _nvlinks(nvml, handle)
    persistence = query(nvml.nvmlDeviceGetPersistenceMode, handle)
    return replace(
        _with_memory(nvml, handle, index),
        bus_id=_bus_id(pci) if pci else "",
        capability=tuple(query(nvml.nvmlDeviceGetCudaComputeCapability, handle) or (0, 0)),
        pcie_generation=query(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or 0,
        pcie_lanes=query(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle) or 0,
        most_pcie_lanes=query(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or 0,
        nvlinks=links,
        nvlink_bytes_per_s=bytes_per_s,
        ecc_errors=query(
            nvml.nvmlDeviceGetTotalEccErrors,
            handle,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
        slowed_by=tuple(why for bit, why in _SLOWED.items() if reasons & bit),
        is_persistent=None if persistence is None else persistence == 1,
    )


def _nvlinks(nvml: Any, handle: Any) -> tuple[tuple[tuple[str, int], ...], float]:
    """How many active links lead where, and what one of them carries each way as NVML says it; 0 if it doesn't."""
    query, partners, bytes_per_s = _query_of(nvml), Counter[str](), 0.0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if query(nvml.nvmlDeviceGetNvLinkState, handle, link) != 1:
            continue
        kind = query(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        pci = query(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            partners[SWITCH] += 1
        elif pci:
            partners[_bus_id(pci)] += 1
        speed = query(
            nvml.nvmlDeviceGetFieldValues, handle, [(nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)]
        )
        if speed and speed[0].nvmlReturn == 0:
            bytes_per_s = 1e6 * speed[0].value.uiVal
    return tuple(sorted(partners.items())), bytes_per_s


def _bus_id(pci: Any) -> str:
    return _text(pci.busId).lower()


def _query_of(nvml: Any) -> Callable[..., Any]:
    """A question to NVML, whose answer is None where the card, the driver or the package doesn't know it."""

    def query(ask: Callable[..., Any], *args: Any) -> Any:
        try:
            return ask(*args)
        except nvml.NVMLError:
            return None

    return query
