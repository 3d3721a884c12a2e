"""What doctor makes of what was seen of GPUs, without any."""

from __future__ import annotations

import sys

import pytest
from fake_nvml import FakeCard, fake_nvml
from hypothesis import given
from hypothesis import strategies as st

from paceline.base import drivers
from paceline.cluster import accelerators, nvml
from paceline.cluster.accelerators import Gpu
from paceline.cluster.nvml import SWITCH, Card, Cards
from paceline.doctor import gpu_findings, machine
from paceline.doctor.gpu_findings import (
    SeenGpus,
    judge_driver,
    judge_gpus,
    judge_health,
    judge_links,
    judge_memory,
    judge_nccl,
    judge_visible,
    runs_on,
)

H100 = Gpu("H100", 80 << 30)


def seen(*failures: str, capability: tuple[int, int] = (9, 0), built_for: str = "13.0") -> SeenGpus:
    count = len(failures)
    return SeenGpus(
        built_for,
        ("sm_80", "sm_90", "compute_90"),
        (capability,) * count,
        ((True,) * count,) * count,
        failures,
    )


@pytest.mark.parametrize(
    ("seen_gpus", "status", "detail"),
    [
        (seen("", ""), "ok", "2 x H100, 80.0 GiB"),
        (
            seen("", "CUDA error: no kernel image is available"),
            "bad",
            "cuda:1 can't compute: CUDA error: no kernel image",
        ),
        (
            seen("", "", capability=(6, 1)),
            "bad",
            "cuda:0 is of compute capability 6.1, and torch has code for sm_80 sm_90",
        ),
        (seen("", "", capability=(6, 1), built_for=""), "ok", "2 x H100"),
    ],
)  # ROCm's have other names
def test_torch_must_have_code_for_a_card(seen_gpus: SeenGpus, status: str, detail: str):
    judged = judge_gpus([H100, H100], seen_gpus)
    assert judged[0] == status and judged[1].startswith(detail)
    assert (len(judged) == 3) == (status != "ok")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((7, 5), ("sm_70",), True),
        ((7, 0), ("sm_75",), False),
        ((8, 9), ("sm_80", "sm_90"), True),
        ((10, 0), ("sm_90",), False),
        ((10, 0), ("compute_90",), True),
        ((9, 0), ("sm_90a",), True),
        ((10, 3), ("sm_100f",), True),
        ((10, 3), ("sm_100a",), False),
        ((9, 0), (), False),
        ((9, 0), ("gfx942",), False),
    ],
)
def test_which_code_runs(capability: tuple[int, int], architectures: tuple[str, ...], runs: bool):
    assert runs_on(capability, architectures) == runs


@pytest.mark.parametrize(
    ("driver", "cuda", "built_for", "status", "words"),
    [
        (
            "580.95.05",
            (13, 0),
            "13.0",
            "ok",
            "driver 580.95.05, which knows CUDA 13.0; torch is built for CUDA 13.0",
        ),
        ("570.86.10", (12, 8), "13.0", "bad", "needs 580 or newer"),
        ("470.82", None, "12.6", "bad", "needs 525.60.13"),
        ("525.60.13", (12, 0), "12.6", "warn", "its kernels run"),
        ("525.60.13", None, "12.6", "ok", "driver 525.60.13;"),
        (None, None, "12.6", "ok", "is not visible"),
        ("999.1", (99, 0), "99.0", "ok", "CUDA 99.0"),
        ("580.1", (13, 0), "", "ok", "not built for CUDA"),
    ],
)
def test_a_driver_must_know_the_cuda_of_torch(
    driver: str | None, cuda: tuple[int, int] | None, built_for: str, status: str, words: str
):
    judged = judge_driver(driver, cuda, built_for)
    assert judged[0] == status and words in judged[1]


TWO = Cards(
    "580",
    (13, 0),
    (
        Card(0, "H100", "GPU-aaaa-1"),
        Card(
            1, "H100", "GPU-bbbb-2", slices=(Card(1, "1g", "MIG-cccc"), Card(1, "1g", "MIG-dddd"))
        ),
    ),
)


@pytest.mark.parametrize(
    ("value", "status", "words"),
    [
        (None, "ok", "not set"),
        ("0,1", "ok", "0,1"),
        ("1", "ok", "1"),
        ("", "warn", "no GPU is visible"),
        ("GPU-aaaa", "ok", "GPU-aaaa"),
        ("0,2", "warn", "there is no GPU 2, they are numbered 0 to 1; only 0 is visible"),
        ("2", "bad", "no GPU is visible"),
        ("0,0", "bad", "0 is named twice"),
        ("zero", "bad", "neither a number nor a"),
        ("-1", "warn", "no GPU is visible"),
        ("1,-1", "warn", "'-1' is neither"),
        ("GPU-ffff", "bad", "there is no GPU-ffff"),
        ("MIG-cccc", "ok", "MIG-cccc"),
        ("MIG-cccc,MIG-dddd", "warn", "a process uses one slice"),
        (" 0 , 1 ", "ok", "0 , 1"),
    ],
)
def test_what_is_visible(value: str | None, status: str, words: str):
    judged = judge_visible(value, TWO)
    assert judged[0] == status and words in judged[1]
    assert (len(judged) == 3) == (status != "ok")


@given(
    st.text(max_size=12)
    | st.lists(st.sampled_from(["0", "1", "GPU-aaaa-1", "MIG-cccc", "x", ""])).map(",".join)
)
def test_any_words_are_judged(value: str):
    """And what is fine with the cards is fine where they are not known."""
    judged = judge_visible(value, TWO)
    assert judged[0] in ("ok", "warn", "bad")
    assert judged[0] != "ok" or judge_visible(value, None)[0] == "ok"


def test_who_holds_memory_is_named():
    judged = judge_memory(
        [(80 << 30, 80 << 30, ()), (30 << 30, 80 << 30, ("process 7 (python3), 50.0 GiB",))]
    )
    assert judged[:2] == (
        "warn",
        "cuda:0 80.0 of 80.0 GiB free; cuda:1 30.0 of 80.0 GiB free (process 7 (python3), "
        "50.0 GiB)",
    )
    assert judge_memory([(79 << 30, 80 << 30, ())])[0] == "ok"


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({}, "ok", "no errors"),
        ({"ecc_errors": 0, "is_persistent": True}, "ok", "no errors of memory, not slowed"),
        ({"ecc_errors": 3}, "bad", "cuda:0 has had 3 errors of memory"),
        ({"is_cut": True}, "warn", "NCCL does not work"),
        ({"uuid": "MIG-1"}, "warn", "cut into slices (MIG)"),
        ({"slowed_by": ("heat, by the card",)}, "warn", "cuda:0: heat"),
        ({"pcie_lanes": 4, "most_pcie_lanes": 16}, "warn", "cuda:0 uses 4 of 16 PCIe lanes"),
        ({"is_persistent": False}, "ok", "without persistence mode"),
    ],
)
def test_the_health_of_cards(fields: dict[str, object], status: str, words: str):
    judged = judge_health([Card(0, "H100", **{"uuid": "GPU-1", **fields}), None])  # type: ignore[arg-type]
    assert judged[0] == status and words in judged[1]


def test_without_nvml_the_health_is_not_known():
    assert judge_health([None]) == ("ok", "NVML can't be asked", gpu_findings._NVML_MISSING)


def wired(count: int, **fields: object) -> list[Card | None]:
    return [
        Card(
            index,
            "H100",
            str(index),
            bus_id=str(index),
            capability=(9, 0),
            pcie_generation=4,
            pcie_lanes=16,
            **fields,
        )
        for index in range(count)
    ]  # type: ignore[arg-type]


def test_links_that_are_alike_are_told_together():
    access = [[True] * 4] * 4
    judged = judge_links(
        access,
        wired(4, nvlinks=((SWITCH, 18),)),
        {
            (device, other): 300e9 + 10e9 * other
            for device in range(4)
            for other in range(device + 1, 4)
        },
    )
    assert judged == ("ok", "6 pairs by 18 x NVLink 4, peer access, 310 to 330 GB/s copied")


@pytest.mark.parametrize(
    ("access", "measured", "status", "words"),
    [
        (True, 20e9, "ok", "cuda:0-cuda:1 by PCIe 4 x16, peer access, 20 GB/s copied"),
        (True, 5e9, "warn", "cuda:0 to cuda:1 carries 5 GB/s of 22.1"),
        (False, 18e9, "warn", "no peer access"),
        (True, None, "ok", "not measured"),
    ],
)
def test_links_that_are_slow_or_go_through_the_host(
    access: bool, measured: float | None, status: str, words: str
):
    judged = judge_links(
        [[True, access], [access, True]], wired(2), {} if measured is None else {(0, 1): measured}
    )
    assert judged[0] == status and words in judged[1]
    assert (len(judged) == 3) == (status != "ok")


def test_wires_that_nobody_knows_are_measured_all_the_same():
    assert judge_links([[True] * 2] * 2, [None, None], {(0, 1): 5e9})[:2] == (
        "ok",
        "cuda:0-cuda:1 by wires unknown, peer access, 5 GB/s copied",
    )


@pytest.mark.parametrize(
    ("problem", "status", "fix"),
    [
        ("", "ok", ""),
        ("the process that was asked gave no answer within 90 s", "bad", "NCCL_P2P_DISABLE=1"),
        ("rank 1 gave no sign of life for 60 s", "bad", "NCCL_P2P_DISABLE=1"),
        (
            "Traceback (most recent call last):\nRuntimeError: NCCL error: unhandled system error",
            "bad",
            "NCCL_DEBUG=INFO paceline doctor",
        ),
    ],
)
def test_what_nccl_did(problem: str, status: str, fix: str):
    judged = judge_nccl("2.29.7", problem, 1.0)
    assert judged[0] == status and "2.29.7; two GPUs" in judged[1] and fix in "".join(judged[2:])


def test_checks_come_after_the_gpus_where_there_is_a_driver(monkeypatch: pytest.MonkeyPatch):
    """Also where torch can use none: the reason may be among them. All that is seen of the cards is NVML's then."""
    monkeypatch.setattr(drivers, "has_driver_of", lambda maker: maker.name == "NVIDIA")
    monkeypatch.setattr(accelerators, "_seen", tuple)
    monkeypatch.setattr(
        machine, "_CHECKS", {name: lambda: ("ok", "") for name in ("torch", "GPUs", "NCCL")}
    )
    monkeypatch.setitem(
        sys.modules, "pynvml", fake_nvml([FakeCard(0, ecc=2)], driver="470.1", cuda=11040)
    )
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    findings = machine.examine()
    assert [(finding.name, finding.status) for finding in findings] == [
        ("torch", "ok"),
        ("GPUs", "ok"),
        ("GPU driver", "bad"),
        ("CUDA_VISIBLE_DEVICES", "bad"),
        ("GPU memory", "ok"),
        ("GPU health", "bad"),
        ("GPU links", "ok"),
        ("NCCL", "ok"),
    ]
    assert nvml.read() is not None
