"""The links between GPUs of this machine and their bandwidth, from NVML's reports, never
assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.cluster.catalogue import LinkKind, link
from paceline.cluster.devices import link_of
from paceline.cluster.links import Link
from paceline.cluster.nvml import Card

# NVLink by the major number of a card's compute capability, with the number of links that the
# catalogue's figure counts.
_NVLINKS = {
    6: ("nvlink1", 4),
    7: ("nvlink2", 6),
    8: ("nvlink3", 12),
    9: ("nvlink4", 18),
    10: ("nvlink5", 18),
}
_LANES = 16  # lanes that the catalogue's figures for PCIe count
_NEWEST_PCIE = 6  # in the catalogue


def between(card: Card, other: Card) -> Link | None:
    """Return the link between two cards: NVLink if there is any, else PCIe at the slower card's
    speed.

    `source` names it. The result is None if NVML knows neither. A way through both processors of a
    host is slower than this, and so is one through the host's memory, which is used if cards can't
    read each other's memory. Only a measurement finds that (`api/links.py`).
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


def wires(cards: Sequence[Card | None]) -> list[Link | None]:
    """Return the links between each two cards; None for those of cards that are not known."""
    return [
        between(card, other) if card is not None and other is not None else None
        for number, card in enumerate(cards)
        for other in cards[:number]
    ]


def slowest(cards: Sequence[Card | None]) -> Link | None:
    """Return the slowest of the links between each two cards; None if one of them is not known."""
    links = wires(cards)
    known = [wire for wire in links if wire is not None]
    return (
        min(known, key=lambda wire: wire.bytes_per_s)
        if known and len(known) == len(links)
        else None
    )


def _pcie(card: Card) -> Link | None:
    if not card.pcie_generation or not card.pcie_lanes:
        return None
    kind, lanes = link(f"pcie{min(card.pcie_generation, _NEWEST_PCIE)}"), card.pcie_lanes
    return _reached(
        f"PCIe {card.pcie_generation} x{lanes}", kind.bytes_per_s / _LANES * lanes, kind
    )


def _reached(name: str, bytes_per_s: float, kind: LinkKind) -> Link:
    return replace(link_of(replace(kind, bytes_per_s=bytes_per_s)), source=name)
