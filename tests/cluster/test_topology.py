"""How GPUs are wired, from what NVML says, gives a link's figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.nvml import SWITCH, Card
from paceline.cluster.topology import between, slowest


def card(index: int, **fields: object) -> Card:
    given: dict[str, object] = {
        "capability": (9, 0),
        "pcie_generation": 5,
        "pcie_lanes": 16,
        **fields,
    }
    return Card(index, "H100", f"GPU-{index}", bus_id=str(index), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "name", "bytes_per_s"),
    [
        ({"nvlinks": ((SWITCH, 18),)}, "18 x NVLink 4", 450e9 * 0.78),
        ({"nvlinks": ((SWITCH, 12),), "capability": (8, 0)}, "12 x NVLink 3", 300e9 * 0.78),
        (
            {"nvlinks": ((SWITCH, 4),), "capability": (8, 6), "nvlink_bytes_per_s": 14.062e9},
            "4 x NVLink 3",
            4 * 14.062e9 * 0.78,
        ),
        (
            {"nvlinks": ((SWITCH, 18),), "nvlink_bytes_per_s": 26.562e9},
            "18 x NVLink 4",
            450e9 * 0.78,
        ),
        ({"nvlinks": ((SWITCH, 18),), "capability": (10, 0)}, "18 x NVLink 5", 900e9 * 0.75),
        ({}, "PCIe 5 x16", 63e9 * 0.7),
        ({"pcie_generation": 3, "pcie_lanes": 8}, "PCIe 3 x8", 15.75e9 / 2 * 0.7),
        ({"pcie_generation": 1, "pcie_lanes": 1}, "PCIe 1 x1", 0.25e9 * 0.7),
        ({"pcie_generation": 7}, "PCIe 7 x16", 121e9 * 0.7),
    ],
)
def test_figures_are_those_of_the_catalogue(
    fields: dict[str, object], name: str, bytes_per_s: float
):
    wire = between(card(0, **fields), card(1, **fields))
    assert wire is not None and wire.source == name
    assert wire.bytes_per_s == pytest.approx(bytes_per_s)


def test_the_slower_card_sets_the_pace():
    assert between(card(0), card(1, pcie_generation=4)) == between(
        card(0, pcie_generation=4), card(1)
    )
    assert getattr(between(card(0), card(1, pcie_generation=4)), "source", "") == "PCIe 4 x16"


def test_what_nvml_does_not_say_is_not_assumed():
    assert between(card(0), card(1, pcie_lanes=0)) is None
    assert slowest([card(0), card(1), None]) is None
    assert slowest([card(0), card(1), card(2, pcie_lanes=0)]) is None
    assert slowest([card(0)]) is None


@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from([1, 4, 8, 16])), min_size=2, max_size=5)
)
def test_the_slowest_wire_is_one_of_a_pair(kinds: list[tuple[int, int]]):
    """And no pair is slower."""
    cards = [
        card(index, pcie_generation=generation, pcie_lanes=lanes)
        for index, (generation, lanes) in enumerate(kinds)
    ]
    slowest_wire = slowest(list(cards))
    wires = [between(card, other) for card in cards for other in cards if card is not other]
    assert slowest_wire in wires and slowest_wire is not None
    assert all(wire is not None and wire.bytes_per_s >= slowest_wire.bytes_per_s for wire in wires)
