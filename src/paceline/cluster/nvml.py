"""The reports of NVIDIA's management library, NVML, on the cards of this machine.

NVML does not start CUDA, so this process may ask it before it forks ranks. It comes with the
driver; Python reaches it through the package nvidia-ml-py (the extra `gpu`). NVML numbers cards by
their places on the bus and ignores CUDA_VISIBLE_DEVICES, so cards and CUDA's devices are matched by
their UUIDs.
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
# Reasons why a card runs slower than it could: bits of nvmlDeviceGetCurrentClocksEventReasons. The
# power limit is left out, because a card that computes is always near it.
_SLOWED = {
    0x8: "a hardware slowdown",
    0x20: "heat, by the driver",
    0x40: "heat, by the card",
    0x80: "the power supply's brake",
}


@dataclass(frozen=True, slots=True)
class CardProcess:
    """A process that holds memory of a card."""

    pid: int
    name: str
    num_bytes: int | None  # None if NVML can't say

    def __str__(self) -> str:
        memory = "" if self.num_bytes is None else f", {self.num_bytes / 2**30:.1f} GiB"
        return f"process {self.pid}{self.name and f' ({self.name})'}{memory}"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or one of the slices (MIG) that it is cut into."""

    index: int
    name: str
    uuid: str
    bus_id: str = ""  # empty for a slice
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    free_bytes: int = 0  # memory of this process counts as free
    holders: tuple[CardProcess, ...] = ()  # other processes that hold memory of the card
    is_cut: bool = False  # whether MIG is switched on
    slices: tuple[Card, ...] = ()  # of a card that is cut
    # The best generation that the card and its slot support together; an idle card uses less. 0 if
    # it is not known.
    pcie_generation: int = 0
    pcie_lanes: int = 0  # lanes in use; 0 if they are not known
    most_pcie_lanes: int = 0  # lanes that the card and its slot both have; 0 if they are not known
    # Numbers of links by the other end: the bus_id of a card, or SWITCH.
    nvlinks: tuple[tuple[str, int], ...] = ()
    nvlink_bytes_per_s: float = 0.0  # of one link in one direction
    # Errors that could not be corrected, since the driver was loaded; None if the card has no ECC.
    ecc_errors: int | None = None
    slowed_by: tuple[str, ...] = ()
    is_persistent: bool | None = None

    def num_nvlinks(self, other: Card) -> int:
        """Return the number of links that lead to another card, directly or through switches."""
        links, other_links = dict(self.nvlinks), dict(other.nvlinks)
        return links.get(other.bus_id, 0) or min(links.get(SWITCH, 0), other_links.get(SWITCH, 0))


@dataclass(frozen=True, slots=True)
class Cards:
    """All cards of the machine."""

    driver: str  # the driver's version
    cuda: tuple[int, int]  # the newest version of CUDA that the driver runs
    cards: tuple[Card, ...]

    def find(self, uuid: str) -> Card | None:
        """Return a card or a slice by its UUID, which may have NVIDIA's prefix; None if there is
        none.
        """

        def plain(text: str) -> str:
            return text.removeprefix("GPU-").removeprefix("MIG-").lower()

        everything = [device for card in self.cards for device in (card, *card.slices)]
        return next(
            (device for device in everything if uuid and plain(device.uuid) == plain(uuid)), None
        )


def read() -> Cards | None:
    """Ask NVML for all figures; None if the package or the library is missing, or the driver
    doesn't answer.
    """
    return _with_nvml(_read)


def read_memory(uuid: str) -> Card | None:
    """Read the memory of one card or slice; other figures stay at their defaults.

    This is quicker than `read`.
    """

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
    """Return the other processes that compute or draw on a card, and the bytes that this process
    holds there.

    The process that holds most memory comes first.
    """
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
    """Return the numbers of active links by their other ends, and the bandwidth of one link in each
    direction.

    The bandwidth is 0 if NVML does not report it.
    """
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
    """Return a function that asks NVML; its result is None if the card, the driver or the package
    can't answer.
    """

    def query(ask: Callable[..., Any], *args: Any) -> Any:
        try:
            return ask(*args)
        except nvml.NVMLError:
            return None

    return query
