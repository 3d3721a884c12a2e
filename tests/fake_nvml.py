"""A package pynvml that answers what a test says, in the words of nvidia-ml-py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """The card, the driver or the package doesn't know."""


class FakeCard(SimpleNamespace):
    """One card. Questions whose field is missing are not supported.

    links: the far end of each NVLink: another card's bus_id or "switch". processes: (pid, name, bytes).
    """

    def __init__(self, index: int, **fields: Any) -> None:
        super().__init__(
            **{
                "name": "NVIDIA H100 80GB HBM3",
                "uuid": f"GPU-{index:08x}-0000",
                "bus_id": f"00000000:{index:02X}:00.0",
                "total": 80 << 30,
                "free": 80 << 30,
                "processes": (),
                "links": (),
                "slices": (),
                "capability": (9, 0),
                "generation": 5,
                "lanes": 16,
                "most_lanes": 16,
                "persistent": 1,
                "ecc": 0,
                "reasons": 0,
                **fields,
            }
        )


def fake_nvml(
    cards: Sequence[FakeCard], *, driver: str = "580.95.05", cuda: int = 13000, fails: bool = False
) -> ModuleType:
    """The package; `fails` where there is no driver."""
    names = {pid: name for card in cards for pid, name, _ in card.processes}
    far = {"switch": 2}

    def start() -> None:
        if fails:
            raise NVMLError("NVML Shared Library Not Found")

    def of(field: str) -> Any:
        def ask(card: FakeCard, *_: Any) -> Any:
            if not hasattr(card, field):
                raise NVMLError("Not Supported")
            return getattr(card, field)

        return ask

    def link(card: FakeCard, number: int) -> str:
        if number >= len(card.links):
            raise NVMLError("Invalid Argument")
        return str(card.links[number])

    functions: Mapping[str, Any] = {
        "nvmlInit": start,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: driver,
        "nvmlSystemGetCudaDriverVersion": lambda: cuda,
        "nvmlSystemGetProcessName": lambda pid: names[pid],
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: cards[index],
        "nvmlDeviceGetName": of("name"),
        "nvmlDeviceGetUUID": of("uuid"),
        "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(
            total=of("total")(card), free=of("free")(card)
        ),
        "nvmlDeviceGetMigMode": lambda card: [int(bool(card.slices))] * 2,
        "nvmlDeviceGetMaxMigDeviceCount": lambda card: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda card, number: _item(card.slices, number),
        "nvmlDeviceGetComputeRunningProcesses": lambda card: [
            SimpleNamespace(pid=pid, usedGpuMemory=used_bytes)
            for pid, _, used_bytes in card.processes
        ],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda card: [],
        "nvmlDeviceGetCurrentClocksThrottleReasons": of("reasons"),
        "nvmlDeviceGetPciInfo": lambda card: SimpleNamespace(busId=of("bus_id")(card)),
        "nvmlDeviceGetCudaComputeCapability": of("capability"),
        "nvmlDeviceGetMaxPcieLinkGeneration": of("generation"),
        "nvmlDeviceGetCurrPcieLinkWidth": of("lanes"),
        "nvmlDeviceGetMaxPcieLinkWidth": of("most_lanes"),
        "nvmlDeviceGetTotalEccErrors": of("ecc"),
        "nvmlDeviceGetPersistenceMode": of("persistent"),
        "nvmlDeviceGetNvLinkState": lambda card, number: int(bool(link(card, number))),
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda card, number: far.get(link(card, number), 0),
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda card, number: SimpleNamespace(
            busId=link(card, number)
        ),
        "nvmlDeviceGetFieldValues": lambda card, wanted: [
            SimpleNamespace(
                nvmlReturn=0 if hasattr(card, "link_mbps") else 3,
                value=SimpleNamespace(uiVal=getattr(card, "link_mbps", 0)),
            )
        ],
    }
    made = ModuleType("pynvml")
    made.__dict__.update(
        functions,
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=36,
        NVML_NVLINK_DEVICE_TYPE_SWITCH=2,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        NVML_FI_DEV_NVLINK_GET_SPEED=164,
    )
    return made


def _item(items: Sequence[Any], number: int) -> Any:
    if number >= len(items):
        raise NVMLError("Not Found")
    return items[number]
