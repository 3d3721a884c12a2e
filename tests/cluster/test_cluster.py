"""Devices are named, counted and described; what doesn't exist is refused."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.errors import ClusterError
from paceline.cluster import cluster, limits
from paceline.cluster.accelerators import FreeMemory
from paceline.cluster.cluster import Cluster, _parse_names, names_of
from paceline.cluster.devices import Device
from paceline.cluster.limits import free_memory_bytes, usable_cores, usable_memory_bytes
from paceline.cluster.links import LOOPBACK


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs."""
    devices = [Device("cuda", index, 80 * 2**30, name="H100") for index in range(4)]
    monkeypatch.setattr(cluster, "_gpus", lambda: devices)
    monkeypatch.setattr(cluster, "room", lambda index: FreeMemory(80 * 2**30))
    monkeypatch.setattr(cluster, "cards", lambda: (None,) * 4)


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with three cores and no GPU."""
    monkeypatch.setattr(cluster, "_gpus", list)
    monkeypatch.setattr(cluster, "usable_cores", lambda: 3)
    monkeypatch.setattr(cluster, "usable_memory_bytes", lambda: 12_000)


def names(local_cluster: Cluster) -> str:
    return ",".join(map(str, local_cluster.devices))


@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize(
    ("devices", "num_ranks", "expected"),
    [
        (None, None, "cpu:0,cpu:1,cpu:2"),
        (None, 5, "cpu:0,cpu:1,cpu:2,cpu:3,cpu:4"),
        ("cpu", None, "cpu:0"),
        ("cpu:0-2", None, "cpu:0,cpu:1,cpu:2"),
        ("cpu:3, cpu:0", None, "cpu:3,cpu:0"),
        ("cpu:0-1,cpu:7", None, "cpu:0,cpu:1,cpu:7"),
    ],
)
def test_devices_of_a_machine_without_gpus(
    devices: str | None, num_ranks: int | None, expected: str
):
    """One rank a core by default, more if asked; names and ranges are taken in the order given."""
    local_cluster = Cluster.local(devices, num_ranks=num_ranks)
    assert names(local_cluster) == expected
    assert local_cluster.link == LOOPBACK


@pytest.mark.usefixtures("cpus")
def test_cpu_ranks_share_the_memory():
    """What one rank may use is its part of the machine's."""
    assert [device.memory_bytes for device in Cluster.local(num_ranks=4).devices] == [3000] * 4


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("devices", "num_ranks", "expected"),
    [
        (None, None, "cuda:0,cuda:1,cuda:2,cuda:3"),
        (None, 2, "cuda:0,cuda:1"),
        ("cuda:2-3", None, "cuda:2,cuda:3"),
    ],
)
def test_gpus_are_taken_when_there_are_any(
    devices: str | None, num_ranks: int | None, expected: str
):
    """All GPUs by default, the first ones for fewer ranks, or the named ones."""
    local_cluster = Cluster.local(devices, num_ranks=num_ranks)
    assert names(local_cluster) == expected
    assert local_cluster.link.source == "not known, counted as pcie3"
    assert local_cluster.devices[0].memory_bytes == 80 * 2**30


@pytest.mark.usefixtures("gpus")
def test_cpus_can_be_asked_for_beside_gpus():
    """Naming CPU devices leaves the GPUs alone."""
    assert names(Cluster.local("cpu:0,cpu:1")) == "cpu:0,cpu:1"


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("devices", "num_ranks", "message"),
    [
        ("cuda:4", None, "there is no cuda:4: this machine has 4 GPUs"),
        (None, 5, "5 ranks need 5 GPUs and this machine has 4"),
        ("cpu:0,cuda:0", None, "mixes CPU and CUDA devices"),
        ("cpu:0,cpu:0", None, "a device is named twice"),
        ("cpu:0-2,cpu:1", None, "a device is named twice"),
        ("cdua:0", None, "unknown device kind 'cdua', did you mean 'cuda'?"),
        ("cuda:", None, "can't read device 'cuda:'"),
        ("cuda:3-1", None, "runs backwards"),
        ("", None, "no device is named"),
        ("0,1", None, "can't read device '0'"),
        ("cuda:0,cuda:0", None, "a device is named twice in 'cuda:0,cuda:0': cuda:0"),
        ("cuda:0,cuda:0", None, "name one device for each rank, as cuda:0-3 or cpu:0,cpu:1"),
        ("2xcuda:0", None, "can't read device '2xcuda:0'"),
        ("2xcuda:0", None, "NCCL refuses two ranks on one GPU"),
        ("cuda:0x2", None, "can't read device 'cuda:0x2'"),
        ("2x", None, "can't read device"),
        (
            None,
            5,
            'a plan of at most 4 ranks, or --devices cpu:0-4 (in Python devices="cpu:0-4")',
        ),
        ("cuda:9", None, '--devices cpu:0 (in Python devices="cpu:0") runs on the CPU'),
        (["cuda:0"], None, "devices is text, got ['cuda:0']"),
    ],
)
def test_devices_that_make_no_sense_are_refused(
    devices: str | None, num_ranks: int | None, message: str
):
    """The message names the device and what there is."""
    with pytest.raises(ClusterError) as caught:
        Cluster.local(devices, num_ranks=num_ranks)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


@given(st.lists(st.integers(0, 5), min_size=1, unique=True))
def test_names_of_devices_are_read_as_they_are_written(gpus: list[int]):
    """In the order of ranks."""
    named = [("cuda", index) for index in gpus]
    text = names_of([Device(kind, index, 1) for kind, index in named])
    assert _parse_names(text) == named
    assert names_of([f"{kind}:{index}" for kind, index in _parse_names(text)]) == text


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("devices", "num_ranks", "expected"),
    [
        (None, 6, "cpu:0,cpu:1,cuda:0,cuda:1,cuda:2,cuda:3"),
        (None, 3, "cpu:0,cpu:1,cuda:0"),
        ("cuda:2-3", 4, "cpu:0,cpu:1,cuda:2,cuda:3"),
        ("cuda:1,cpu:4-5,cuda:0", 4, "cpu:4,cpu:5,cuda:1,cuda:0"),
        ("cpu:0-3", 4, "cpu:0,cpu:1,cpu:2,cpu:3"),
    ],
)
def test_the_first_ranks_compute_on_the_cpu(devices: str | None, num_ranks: int, expected: str):
    """Servers take no GPU, whether CPUs are named for them or not."""
    local_cluster = Cluster.local(devices, num_ranks=num_ranks, num_cpu_ranks=2)
    assert names_of(local_cluster.devices) == expected
    assert local_cluster.link == LOOPBACK


@pytest.mark.usefixtures("gpus")
def test_cpus_beside_gpus_that_make_no_sense():
    with pytest.raises(ClusterError, match="names 1 CPUs, and 2 ranks of the plan, its servers"):
        Cluster.local("cuda:0-1,cpu:0", num_ranks=4, num_cpu_ranks=2)
    with pytest.raises(
        ClusterError, match="5 ranks beside 2 on CPUs need 5 GPUs and this machine has 4"
    ):
        Cluster.local(num_ranks=7, num_cpu_ranks=2)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 4),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("800000 100000", 4),
        ("", 4),
        (None, 4),
    ],
)
def test_a_cgroup_limits_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str | None, cores: int
):
    """A container with a quota of two and a half cores has two to give."""
    monkeypatch.setattr(cluster.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores() == cores


V2, V1 = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def limit_memory(folder: Path, names: tuple[str, str, str], limit: str, used: int = 0) -> None:
    """Of what is used, 300 bytes are files in the cache."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon 7\n{names[2]}inactive_file 100\n{names[2]}active_file 200\n"
    )


@pytest.mark.parametrize(("root", "names"), [("", V2), ("memory", V1)])
@pytest.mark.parametrize(
    ("limit", "is_limited"), [("4096", True), ("max", False), (str(2**62), False)]
)
def test_a_cgroup_limits_the_memory(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    root: str,
    names: tuple[str, str, str],
    limit: str,
    is_limited: bool,
):
    """The smaller of the machine's memory and the container's is what ranks may use. What files in the cache take is
    free."""
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    limit_memory(tmp_path / root, names, limit, used=1300)
    assert usable_memory_bytes() == (4096 if is_limited else psutil.virtual_memory().total)
    free = psutil.virtual_memory().available
    assert free_memory_bytes() == (3096 if is_limited else pytest.approx(free, rel=0.5))
    limit_memory(tmp_path / root, names, limit, used=9000)
    assert free_memory_bytes() == (0 if is_limited else pytest.approx(free, rel=0.5))


@pytest.mark.parametrize(
    ("root", "names", "cgroups"),
    [
        ("", V2, "0::/jobs/one/step\n"),
        ("memory", V1, "9:cpu:/\n4:hugetlb,memory:/jobs/one/step\n0::/\n"),
    ],
)
def test_the_least_limit_of_all_cgroups_around_a_process_holds(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    root: str,
    names: tuple[str, str, str],
    cgroups: str,
):
    """Schedulers limit a job, and not the root that a container sees."""
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    monkeypatch.setattr(limits, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(cgroups)
    limit_memory(tmp_path / root / "jobs" / "one", names, "5000", used=1300)
    limit_memory(tmp_path / root / "jobs", names, "8000", used=7300)
    limit_memory(tmp_path / root / "jobs" / "other", names, "10")
    assert usable_memory_bytes() == 5000 and free_memory_bytes() == 1000


def test_a_job_s_quota_limits_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(cluster.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(limits, "_CGROUP", tmp_path)
    monkeypatch.setattr(limits, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/jobs/one\n")
    (tmp_path / "jobs" / "one").mkdir(parents=True)
    (tmp_path / "jobs" / "cpu.max").write_text("200000 100000\n")
    (tmp_path / "jobs" / "one" / "cpu.max").write_text("max 100000\n")
    assert usable_cores() == 2
    (tmp_path / "own").write_text("2:cpu,cpuacct:/jobs/two\n")
    for folder, quota in (("jobs/two", -1), ("jobs", 300_000)):
        (tmp_path / "cpu" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cpu" / folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / "cpu" / folder / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores() == 3


@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100", [100, 100]),
        ("2KiB", [2048, 2048]),
        ("1.5kb", [1500, 1500]),
        ("1GiB,2GB", [2**30, 2 * 10**9]),
        ("1MiB 3MiB", [2**20, 3 * 2**20]),
    ],
)
def test_memory_limits(text: str, expected: list[int]):
    """One limit for all ranks or one a rank, in either kind of unit."""
    devices = Cluster.local("cpu:0-1", memory=text).devices
    assert [device.memory_bytes for device in devices] == expected
    assert all(device.is_limit for device in devices)
    assert not any(device.is_limit for device in Cluster.local("cpu:0-1").devices)


@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("much", "can't read the size 'much'(?s:.*)such as 512MiB"),
        ("5XB", "can't read the size '5XB'"),
        ("-1GiB", "can't read"),
        ("0", "can't read"),
        ("", "names 0 limits for 2 devices"),
        ("1GiB,1GiB,1GiB", "names 3 limits for 2 devices(?s:.*)one a device"),
    ],
)
def test_memory_limits_that_make_no_sense(text: str, message: str):
    """What can't be read is refused with what can."""
    with pytest.raises(ClusterError, match=message):
        Cluster.local("cpu:0-1", memory=text)


@pytest.mark.usefixtures("gpus")
def test_gpus_have_no_other_limit():
    """A limit on a GPU would not be kept, so it is refused."""
    with pytest.raises(ClusterError, match="for CPU ranks"):
        Cluster.local("cuda:0", memory="1GiB")
