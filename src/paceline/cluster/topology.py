"""How two GPUs of this machine are wired, and what their link carries: from NVML's report on both, never assumed."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cluster.catalogue import LinkKind, link
from paceline.cluster.nvml import Card

# NVLink by the major number of a card's compute capability, and how many links the catalogue's figure is of.
_NVLINKS = {
    6: ("nvlink1", 4),
    7: ("nvlink2", 6),
    8: ("nvlink3", 12),
    9: ("nvlink4", 18),
    10: ("nvlink5", 18),
}
_LANES = 16  # of the catalogue's figures for PCIe
_NEWEST_PCIE = 6  # in the catalogue


@dataclass(frozen=True, slots=True)
class GpuLink:
    """What connects two GPUs. bytes_per_s: one direction, as much as collectives reach of it."""

    name: str
    bytes_per_s: float
    latency_s: float


def between(card: Card, other: Card) -> GpuLink | None:
    """By NVLink where there is any, else by PCIe, as fast as the slower card's; None where NVML knows neither.

    A way through both processors of a host, or through its memory because cards can't read each other's, is slower than
    this: only a measurement finds that (`api/links.py`).
    """
    count = card.num_nvlinks(other)
    if count and card.capability[0] in _NVLINKS:
        name, all_links = _NVLINKS[card.capability[0]]
        kind = link(name)
        each = kind.bytes_per_s / all_links
        if card.nvlink_bytes_per_s:  # those of cards for desks are slower than those of servers
            each = min(each, card.nvlink_bytes_per_s)
        return _reached(f"{count} x NVLink {name.removeprefix('nvlink')}", count * each, kind)
    ways = [way for way in (_pcie(card), _pcie(other)) if way is not None]
    return min(ways, key=lambda way: way.bytes_per_s) if len(ways) == 2 else None


def slowest(cards: list[Card | None]) -> GpuLink | None:
    """Of the wires between each two; None where one of them is not known."""
    links = [
        between(card, other) if card is not None and other is not None else None
        for number, card in enumerate(cards)
        for other in cards[:number]
    ]
    known = [wire for wire in links if wire is not None]
    return (
        min(known, key=lambda wire: wire.bytes_per_s)
        if known and len(known) == len(links)
        else None
    )


def _pcie(card: Card) -> GpuLink | None:
    if not card.pcie_generation or not card.pcie_lanes:
        return None
    kind, lanes = link(f"pcie{min(card.pcie_generation, _NEWEST_PCIE)}"), card.pcie_lanes
    return _reached(
        f"PCIe {card.pcie_generation} x{lanes}", kind.bytes_per_s / _LANES * lanes, kind
    )


def _reached(name: str, bytes_per_s: float, kind: LinkKind) -> GpuLink:
    return GpuLink(name, bytes_per_s * kind.reached, kind.latency_s)
