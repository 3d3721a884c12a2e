"""What NVML says becomes plain values; what it doesn't know is left out."""

from __future__ import annotations

import os
import sys

import pytest
from fake_nvml import FakeCard, fake_nvml
from later import needed

from paceline.cluster import nvml
from paceline.cluster.nvml import CardProcess, Cards


def read_cards(monkeypatch: pytest.MonkeyPatch, *cards: FakeCard, **options: int) -> Cards:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(cards, **options))
    reading = nvml.read()
    assert reading is not None
    return reading


def test_a_card(monkeypatch: pytest.MonkeyPatch):
    """This process's own memory is no other's."""
    reading = read_cards(
        monkeypatch,
        FakeCard(
            0,
            free=40 << 30,
            reasons=0x68,
            ecc=2,
            processes=(
                (71, "/usr/bin/python3", 8 << 30),
                (72, "other", 30 << 30),
                (os.getpid(), "me", 1 << 30),
            ),
        ),
    )
    (card,) = reading.cards
    assert (reading.driver, reading.cuda, card.pcie_generation, card.pcie_lanes) == (
        "580.95.05",
        (13, 0),
        5,
        16,
    )
    assert (card.total_bytes, card.free_bytes, card.ecc_errors, card.is_persistent) == (
        80 << 30,
        41 << 30,
        2,
        True,
    )
    assert card.holders == (CardProcess(72, "other", 30 << 30), CardProcess(71, "python3", 8 << 30))
    assert str(card.holders[1]) == "process 71 (python3), 8.0 GiB"
    assert card.slowed_by == ("a hardware slowdown", "heat, by the driver", "heat, by the card")


def test_a_card_that_answers_little(monkeypatch: pytest.MonkeyPatch):
    """A card for games has no ECC, a container shows no names of processes, and old drivers know less."""
    card = FakeCard(0, processes=((71, "x", None),))
    for field in (
        "ecc",
        "reasons",
        "persistent",
        "generation",
        "lanes",
        "most_lanes",
        "bus_id",
        "total",
    ):
        delattr(card, field)
    (seen_card,) = read_cards(monkeypatch, card).cards
    assert (
        seen_card.ecc_errors,
        seen_card.is_persistent,
        seen_card.pcie_lanes,
        seen_card.bus_id,
        seen_card.total_bytes,
    ) == (None, None, 0, "", 0)
    assert str(seen_card.holders[0]) == "process 71 (x)"


def test_links_lead_to_cards_and_to_switches(monkeypatch: pytest.MonkeyPatch):
    """Two bridges between the first two; a third that both reach by switches has none to a fourth."""
    ids = [f"00000000:{index:02X}:00.0" for index in range(4)]
    reading = read_cards(
        monkeypatch,
        FakeCard(0, links=(ids[1], ids[1], "switch")),
        FakeCard(1, links=(ids[0], ids[0])),
        FakeCard(2, links=("switch", "switch"), link_mbps=25000),
        FakeCard(3),
    )
    first, second, third, fourth = reading.cards
    assert [first.num_nvlinks(second), second.num_nvlinks(first)] == [2, 2]
    assert [first.num_nvlinks(third), third.num_nvlinks(first)] == [1, 1]
    assert [card.num_nvlinks(fourth) for card in (first, second, third)] == [0, 0, 0]
    assert (third.nvlink_bytes_per_s, first.nvlink_bytes_per_s) == (25e9, 0.0)


def test_slices_are_found_by_their_names(monkeypatch: pytest.MonkeyPatch):
    part = FakeCard(
        7, uuid="MIG-aaaa", total=10 << 30, free=9 << 30, name="NVIDIA H100 MIG 1g.10gb"
    )
    reading = read_cards(monkeypatch, FakeCard(0), FakeCard(1, slices=(part,)))
    assert [card.is_cut for card in reading.cards] == [False, True]
    assert reading.find("aaaa") == reading.find("MIG-AAAA") == reading.cards[1].slices[0]
    assert reading.find("00000000-0000") == reading.cards[0]
    assert reading.find("bbbb") is None and reading.find("") is None
    quick = nvml.read_memory("aaaa")
    assert quick is not None and quick.free_bytes == 9 << 30
    assert nvml.read_memory("bbbb") is None


def test_machines_without_nvml(monkeypatch: pytest.MonkeyPatch):
    """No package, and no driver."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.read() is None
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([FakeCard(0)], fails=True))
    assert nvml.read() is None and nvml.read_memory("x") is None


def test_the_package_has_what_is_asked():
    """Where it is installed: the fake has no function that the package lacks."""
    real = needed("pynvml", "nvidia-ml-py")
    assert [
        name
        for name in vars(fake_nvml([]))
        if name[:4] in ("nvml", "NVML") and not hasattr(real, name)
    ] == []
