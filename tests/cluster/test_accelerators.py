"""GPUs that torch can't use are named with a way out; no run falls back to the CPU without a word."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_nvml import FakeCard, fake_nvml

import paceline
from paceline.api.train import _banner
from paceline.api.verify import _devices_here
from paceline.base import drivers
from paceline.base.errors import ClusterError
from paceline.cluster import accelerators
from paceline.cluster.accelerators import unusable
from paceline.cluster.cluster import Cluster
from paceline.doctor.gpus import check_gpus
from paceline.planner.resolve import resolve
from paceline.strategies.plan import Plan

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with these nodes and this build of torch, which can use no GPU."""

    def made(
        *nodes: str,
        cuda: str | None = None,
        hip: str | None = None,
        version: str = "2.13.0+cpu",
        failure: str = "it finds no GPU",
    ) -> None:
        monkeypatch.setattr(Path, "exists", lambda path, **_: str(path) in nodes)
        monkeypatch.setattr(
            Path,
            "glob",
            lambda path, pattern: (node for node in nodes if Path(node).match(f"{path}/{pattern}")),
        )
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(accelerators, "_torch_version", lambda: version)
        monkeypatch.setattr(accelerators, "_seen", tuple)
        monkeypatch.setattr(accelerators, "_failure", lambda: failure)
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)

    return made


NVIDIA, AMD = ("/dev/nvidiactl", "/dev/nvidia0"), ("/dev/kfd", "/dev/dri/renderD128")


@pytest.mark.parametrize(
    ("nodes", "build", "reason", "way_out"),
    [
        (
            NVIDIA,
            {},
            "NVIDIA's driver, and torch 2.13.0+cpu is not built for it",
            "install torch's CUDA build",
        ),
        (NVIDIA, {"hip": "7.1"}, "is not built for it", "install torch's CUDA build"),
        (
            NVIDIA,
            {"cuda": "13.0", "failure": "the driver is too old (found version 11040)"},
            "built for CUDA 13.0, can't use it: the driver is too old",
            "update the driver",
        ),
        (NVIDIA, {"cuda": "13.0"}, "can't use it: it finds no GPU", "update the driver"),
        (
            AMD,
            {},
            "AMD's driver, and torch 2.13.0+cpu is not built for it",
            "install torch's ROCm build",
        ),
        (AMD, {"cuda": "13.0"}, "AMD's driver", "install torch's ROCm build"),
        (AMD, {"hip": "7.1"}, "built for ROCm 7.1, can't use it", "update the driver"),
    ],
)
def test_a_gpu_that_torch_can_not_use_is_named(
    machine: Machine, nodes: tuple[str, ...], build: dict[str, str], reason: str, way_out: str
):
    machine(*nodes, **build)
    unusable_gpu = unusable()
    assert (
        unusable_gpu is not None
        and reason in unusable_gpu.reason
        and way_out in unusable_gpu.way_out
    )
    with pytest.raises(ClusterError) as refused:
        Cluster.local(num_ranks=2)
    assert reason in str(refused.value)
    assert '--devices cpu:0-1 (in Python devices="cpu:0-1") trains on the CPU' in str(refused.value)
    assert [str(device) for device in Cluster.local("cpu:0-1").devices] == ["cpu:0", "cpu:1"]


@pytest.mark.parametrize(
    ("nodes", "build", "hidden"),
    [
        ((), {}, {}),
        ((), {"cuda": "13.0"}, {}),
        (NVIDIA, {}, {"CUDA_VISIBLE_DEVICES": ""}),
        (NVIDIA, {"cuda": "13.0"}, {"CUDA_VISIBLE_DEVICES": "-1"}),
        (AMD, {}, {"HIP_VISIBLE_DEVICES": ""}),
        (("/dev/nvidiactl",), {"cuda": "13.0"}, {}),
        (("/dev/nvidiactl",), {}, {}),
        (("/dev/dxg",), {}, {}),
    ],
)  # Windows' node, for cards of any maker
def test_the_cpu_is_taken_where_no_gpu_is_meant(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    nodes: tuple[str, ...],
    build: dict[str, str],
    hidden: dict[str, str],
):
    """None is there, a driver has no card, or its cards are hidden."""
    machine(*nodes, **build)
    for name, value in hidden.items():
        monkeypatch.setenv(name, value)
    assert unusable() is None
    assert {device.kind for device in Cluster.local(num_ranks=2).devices} == {"cpu"}


@pytest.mark.parametrize(
    ("own_gib", "is_missed"), [([], True), ([0.5], False), ([0.5, 16], True), ([96], True)]
)
def test_graphics_that_are_built_into_a_processor_refuse_no_run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, own_gib: list[float], is_missed: bool
):
    """Their driver is that of AMD's cards. A driver that doesn't say how much memory they have may have a card."""
    machine(*AMD)
    monkeypatch.setattr(
        accelerators, "_amd_memories_bytes", lambda: [int(gib * 2**30) for gib in own_gib]
    )
    assert (unusable() is not None) == is_missed


def test_cards_that_some_are_hidden_of_are_still_missed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    machine(*NVIDIA)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert unusable() is not None


def test_intels_gpus_are_named(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    machine(version="2.13.0+xpu")
    assert unusable() is None
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda index: "Arc B580")
    unusable_gpu = unusable()
    assert unusable_gpu is not None and "Intel's GPU Arc B580" in unusable_gpu.reason


@pytest.fixture
def mac(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(version="2.13.0")
    monkeypatch.setattr(accelerators, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(accelerators, "platform", SimpleNamespace(machine=lambda: "arm64"))


@pytest.mark.usefixtures("mac")
def test_apples_gpu_is_named_and_refuses_no_run():
    assert unusable() is None
    assert (
        accelerators.unused()
        == "this Mac's GPU is not used: Paceline does not train on 'mps' devices yet"
    )
    assert {device.kind for device in Cluster.local(num_ranks=2).devices} == {"cpu"}
    assert check_gpus() == ("ok", f"{accelerators.unused()}; training runs on the CPU")


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("devices", [None, "cpu:0"])
def test_a_run_says_once_that_apples_gpu_is_idle(
    devices: str | None, capsys: pytest.CaptureFixture[str]
):
    """Where the CPU was not named; so does verify."""
    data = [(torch.ones(2), torch.zeros(1)) for _ in range(4)]
    job = paceline.Job(
        model=lambda: torch.nn.Linear(2, 1),
        data=data,
        batch=4,
        steps=1,
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    resolved = resolve(job, Plan(), devices=devices)
    banner = _banner(job, resolved, "", Path("runs/a"), by_name=devices is not None)
    _devices_here(devices)
    reason, times = str(accelerators.unused()), 0 if devices else 1
    assert banner.count(f"\n{reason}; --devices cpu:0 asks for the CPU by name\n") == times
    assert capsys.readouterr().err.count(reason) == times


def test_other_machines_have_no_apples_gpu(monkeypatch: pytest.MonkeyPatch):
    assert accelerators.unused() is None
    monkeypatch.setattr(accelerators, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(accelerators, "platform", SimpleNamespace(machine=lambda: "x86_64"))
    assert accelerators.unused() is None


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("mps", "Paceline does not train on 'mps' devices yet"),
        ("xpu:0-3", "Paceline does not train on 'xpu' devices yet"),
        ("rocm:0", "GPUs of NVIDIA and AMD are both called cuda"),
        ("gpu:0", "both called cuda"),
        ("cdua:0", "unknown device kind 'cdua'"),
    ],
)
def test_other_kinds_of_devices_are_refused_by_name(devices: str, words: str):
    with pytest.raises(ClusterError, match=words):
        Cluster.local(devices)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As torch numbers them: the other way round than the driver does."""
    monkeypatch.setattr(drivers, "has_driver_of", lambda maker: maker.name == "NVIDIA")
    monkeypatch.setattr(
        accelerators,
        "_seen",
        lambda: tuple(
            accelerators.Gpu("H100", 80 << 30, f"{index:08x}-0000") for index in (3, 2, 1, 0)
        ),
    )
    accelerators.cards.cache_clear()
    yield
    accelerators.cards.cache_clear()


@pytest.mark.usefixtures("four_gpus")
def test_a_gpu_has_the_memory_that_others_leave(monkeypatch: pytest.MonkeyPatch):
    """Who holds it is known, and cards are found by their UUIDs; ranks of a launcher count on all."""
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        fake_nvml(
            [
                FakeCard(0, free=(40 << 30) + 5, processes=((71, "/usr/bin/python3", 39 << 30),)),
                FakeCard(1),
                FakeCard(2),
                FakeCard(3, free=(80 << 30) - (100 << 20)),
            ]
        ),
    )  # the driver's own part
    devices = Cluster.local().devices
    assert [device.memory_bytes for device in devices] == [80 << 30] * 3 + [40 << 30]
    assert devices[0] == Cluster.local(whole=True).devices[0] and devices[0].taken == ""
    assert (
        devices[3].taken
        == "cuda:3 has 40.0 GiB free of 80.0: the rest is held by process 71 (python3), 39.0 GiB"
    )
    assert Cluster.local(whole=True).devices[3].memory_bytes == 80 << 30


@pytest.mark.usefixtures("four_gpus")
def test_free_memory_without_nvml(monkeypatch: pytest.MonkeyPatch):
    """CUDA says it in a fork, whose own context is no other's."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    accelerators._free_bytes.cache_clear()
    free = {0: (80 << 30) - (426 << 20), 1: 30 << 30, 2: 80 << 30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 80 << 30))
    try:
        devices = Cluster.local().devices
    finally:
        accelerators._free_bytes.cache_clear()
    whole = 80 << 30  # also of the last one, which can't be asked: its rank will say why
    free_of_second = ((30 << 30) + accelerators.CONTEXT_BYTES) >> 28 << 28  # in steps of 256 MiB
    assert [device.memory_bytes for device in devices] == [whole, free_of_second, whole, whole]
    assert devices[1].taken.endswith("the rest is held by processes the driver doesn't name")


@pytest.mark.usefixtures("four_gpus")
def test_gpus_are_as_fast_as_they_are_wired(monkeypatch: pytest.MonkeyPatch):
    """Pairs of a machine that has bridges between the driver's first two and last two; the slowest wire counts."""
    ids = [f"00000000:{index:02X}:00.0" for index in range(4)]
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        fake_nvml(
            [
                FakeCard(0, links=(ids[1],) * 12),
                FakeCard(1, links=(ids[0],) * 12),
                FakeCard(2, links=(ids[3],) * 12, lanes=8),
                FakeCard(3, links=(ids[2],) * 12),
            ]
        ),
    )
    pair, across = Cluster.local("cuda:0-1").link, Cluster.local().link
    assert (pair.source, pair.bytes_per_s) == (
        "12 x NVLink 4, as the driver says",
        pytest.approx(12 * 25e9 * 0.78),
    )
    assert (across.source, across.bytes_per_s) == (
        "PCIe 5 x8, as the driver says",
        pytest.approx(31.5e9 * 0.7),
    )
    assert Cluster.local("cuda:0").link.source.startswith("not known")
    before = accelerators.identity()
    accelerators.cards.cache_clear()
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([FakeCard(index) for index in range(4)]))
    assert accelerators.identity() != before  # so that what was measured is measured again
