"""Clusters that are described: words and files, and what is wrong with them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.base.errors import ClusterError
from paceline.cluster.catalogue import accelerator, named_by_driver
from paceline.cluster.cluster import Cluster

NODES = '[[nodes]]\ncount = 2\ndevices = ["4xV100"]\n'
MINE = """[accelerator.mine]
bf16_flops_per_s = 1e14
float32_flops_per_s = 1e13
product_reached = 0.8
attention_reached = 0.4
memory_bytes = 1e10
memory_bytes_per_s = 1e12
multiprocessors = 64
link = "pcie4"
network = "ethernet-10"
devices_per_node = 2
[[nodes]]
devices = ["2xmine"]
"""


def written(folder: Path, text: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "devices", "in_a_node"),
    [
        ("8xH100", 8, 8),
        ("16x8xH100", 128, 8),
        ("64xA100", 64, 8),
        ("2x4xrtx 4090", 8, 4),
        ("1xT4", 1, 1),
    ],
)
def test_words(text: str, devices: int, in_a_node: int):
    """Nodes x devices, or devices alone in as many usual nodes as they fill."""
    cluster = Cluster.parse(text)

    assert len(cluster.devices) == devices
    assert cluster.nodes[0].network.devices_per_node == in_a_node


@pytest.mark.parametrize(
    ("text", "devices", "gib", "like"),
    [
        ("2x24GB", 2, 24, "RTX3090"),
        ("8x80GB", 8, 80, "A100-80"),
        ("4x16GiB", 4, 16, "RTX5060Ti"),
        ("2x8x80gb", 16, 80, "A100-80"),
        ("2x20 GB", 2, 20, "RTX5060Ti"),
        ("1x6GB", 1, 6, "RTX5060"),
        ("1x1.5GB", 1, 1.5, "RTX5060"),
        ("8x1000GB", 8, 1000, "B300"),
    ],
)
def test_gpus_of_which_only_the_memory_is_said(text: str, devices: int, gib: float, like: str):
    """They have that memory and the speed of an ordinary card that has no more, and the cluster says so."""
    cluster = Cluster.parse(text)
    device = cluster.devices[0]

    assert (len(cluster.devices), device.memory_bytes) == (devices, int(gib * 2**30))
    assert device.flops_per_byte("bf16") == Cluster.parse(f"1x{like}").devices[0].flops_per_byte(
        "bf16"
    )
    assert cluster.assumptions == (
        f"a GPU of {gib:g}GB is assumed to have the speed, links and nodes of {like}; name "
        "the GPU for its own figures",
    )
    assert not Cluster.parse(f"1x{like}").assumptions


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA GeForce RTX 5070 Ti", "RTX5070Ti"),
        ("NVIDIA GeForce RTX 5070", "RTX5070"),
        ("NVIDIA GeForce RTX 5060 Ti", "RTX5060Ti"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
    ],
)
def test_cards_by_their_drivers_names(driver: str, name: str):
    """A card of the RTX 50 series is found by its driver's name and by its number alone."""
    assert named_by_driver(driver) == accelerator(name) == accelerator(name.removeprefix("RTX"))


def test_cpu_ranks_are_this_machines():
    """They are not described."""
    assert Cluster.parse("2xcpu") == Cluster.local("cpu:0-1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xH10", "unknown accelerator 'H10', did you mean 'H100'"),
        ("8", "can't read the cluster '8'"),
        ("0xH100", "has no devices"),
        ("2x0.5GB", "less than 1 GiB"),
        ("12xH100", "doesn't fill nodes of 8(?s:.*)2x8xH100"),
        ("2x2xcpu", "CPUs of several nodes"),
        ("nowhere.toml", "can't read the cluster nowhere.toml"),
    ],
)
def test_words_that_make_no_sense(text: str, message: str):
    """The message says what is allowed."""
    with pytest.raises(ClusterError, match=message):
        Cluster.parse(text)


def test_uneven_nodes(tmp_path: Path):
    """Ranks are numbered node by node, and a span of them has the kinds it touches."""
    text = (
        NODES
        + 'network_bytes_per_s = 1e9\n[[nodes]]\ndevices = ["2xT4", "2xA10"]\nmemory = "10GiB"\n'
    )
    cluster = Cluster.parse(written(tmp_path, text))

    assert [cluster.devices[rank].name for rank in (0, 7, 8, 9, 10, 11)] == [
        "V100",
        "V100",
        "T4",
        "T4",
        "A10",
        "A10",
    ]
    assert [device.name for device, _ in cluster.span(6, 4)] == ["V100", "T4"]
    assert cluster.span(0, 1)[0][1].across is not None
    assert cluster.link.bytes_per_s == 1e9
    assert cluster.devices[-1].memory_bytes == 10 * 2**30


def test_an_accelerator_of_ones_own(tmp_path: Path):
    """Its figures are the file's; its speed is in float32, as every device's."""
    device = Cluster.parse(written(tmp_path, MINE)).devices[1]

    assert (device.name, device.memory_bytes, device.flops_per_s) == ("mine", 1e10, 0.8e13)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"'nodes' is missing: tables \[\[nodes\]\]"),
        ("[[nodes]]\ncount = 1\n", "'devices' is missing"),
        (NODES + "colour = 1\n", "unknown field 'colour'"),
        (NODES.replace("2", "-2", 1), "count = -2 must be"),
        (
            NODES + "network_bytes_per_s = -1.0\n",
            "network_bytes_per_s = -1.0 must be a number above 0",
        ),
        (NODES + "price_per_hour = -2\n", "price_per_hour = -2 must be a number above 0"),
        (
            NODES + "price_per_hour = 2\n[[nodes]]\ndevices = ['4xT4']\n",
            "some nodes have a price_per_hour and others",
        ),
        (NODES.replace("V100", "V10"), "unknown accelerator 'V10', did you mean 'V100'"),
        (NODES + 'link = "nvlink9"\n', "unknown link 'nvlink9'"),
        (NODES + 'memory = "much"\n', "can't read the size"),
        (NODES + "[other]\n", "unknown field 'other'"),
        ("nodes = 3", "nodes = 3 must be tables"),
        ("[[", "can't read"),
        (
            MINE + "colours = 1\n[other]\n",
            "unknown field 'other'(?s:.*)nodes 0: unknown field 'col",
        ),
        (MINE.replace("multiprocessors = 64\n", ""), "'multiprocessors' is missing"),
        (MINE.replace("= 64", "= 0"), "multiprocessors = 0 must be a number above 0"),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, text: str, message: str):
    """Every field that is missing, unknown or out of range is named."""
    with pytest.raises(ClusterError, match=message):
        Cluster.parse(written(tmp_path, text))


def test_a_hundred_thousand_devices_take_no_room():
    """They are made when they are asked for."""
    cluster = Cluster.parse("12500x8xB200")

    assert len(cluster.devices) == 100_000
    assert cluster.devices[99_999].index == cluster.devices[-1].index == 99_999
    assert len(cluster.span(5_000, 90_000)) == 1
    assert sys.getsizeof(cluster.devices) < 1_000


def test_every_entry_of_the_catalogue_can_be_read():
    """Accelerators name links that are there."""
    for name in (
        "K80",
        "P100",
        "V100",
        "V100-16",
        "T4",
        "A10",
        "L4",
        "A100-40",
        "A100-80",
        "H100",
        "H100-PCIe",
        "H100-NVL",
        "H200",
        "B200",
        "B300",
        "GB200",
        "GB300",
        "RTX3090",
        "RTX4090",
        "RTX5060",
        "RTX5060Ti",
        "RTX5070",
        "RTX5070Ti",
        "RTX5080",
        "RTX5090",
        "MI250X",
        "MI300X",
        "TPUv4",
    ):
        assert accelerator(name).source
        assert Cluster.parse(f"2x{accelerator(name).devices_per_node}x{name}").link.bytes_per_s > 0


def test_a_cluster_of_another_size():
    """Whole nodes of the same kind, or a part of one; a price is of the devices that are used."""
    cluster = Cluster.parse("2x8xH100")
    assert [
        (
            len(cluster.resized(count).devices),
            cluster.resized(count).span(0, 1)[0][1].devices_per_node,
        )
        for count in (1, 4, 8, 24)
    ] == [(1, 1), (4, 4), (8, 8), (24, 8)]
    assert cluster.resized(16) == cluster and cluster.price_per_hour(3) is None
    with pytest.raises(
        ClusterError, match=r"20 devices don't fill nodes of 8(?s:.*)16 or 24 devices"
    ):
        cluster.resized(20)
    priced = Cluster.of(
        tuple(
            replace(kind, price_per_hour=price)
            for kind, price in zip(
                (*cluster.nodes, *Cluster.parse("4xA100").nodes), (3.0, 1.0), strict=True
            )
        )
    )
    assert (priced.price_per_hour(1), priced.price_per_hour(18)) == (3.0, 50.0)
