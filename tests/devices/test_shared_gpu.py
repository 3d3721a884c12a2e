"""Ranks that share a GPU, and servers on CPUs beside it: on the pretended device they compute what the CPU computes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pretended_cuda.client import Workshop, Workshops
from pretended_cuda.plans import ALIKE, EXACT, MORE_ALIKE, MORE_EXACT

from paceline.strategies.plan import Plan
from tests.devices.test_pretended_cuda import assert_alike, on

pytestmark = pytest.mark.timeout(600)  # the first one builds the device


@pytest.fixture(scope="module")
def num_gpus() -> int:
    return 1


def sharing(plan: str) -> str:
    """One GPU for all ranks of a plan but its servers."""
    read = Plan.parse(plan)
    return ",".join(["cuda:0"] * (read.world_size - read.num_cpu_ranks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("few blocks", "data=2 microbatches=auto"),
        ("few blocks", "shard=2"),
        ("few blocks", "tensor=2"),
        ("few blocks", "pipeline=2 microbatches=3"),
        *(
            pytest.param("blocks", plan, marks=pytest.mark.slow)
            for plan in (*EXACT, *MORE_EXACT)
            if plan != "single"
        ),
    ],
)
def test_ranks_that_share_a_gpu_are_one_cpu(shop: Workshop, placement: str, job: str, plan: str):
    """Under every kind of plan that is exact."""
    plan = plan.replace("FILE", placement)
    trained = shop.train(job, plan, sharing(plan))
    assert_alike(trained, shop.train(job, "single", "cpu:0"))
    assert all(rank["devices"] in (["cuda:0"], []) for rank in trained.measured)
    assert trained.first_use is None, (
        f"the process that forks ranks began to use CUDA: {trained.first_use}"
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("plan", [*ALIKE, *MORE_ALIKE])
def test_relaxed_plans_of_ranks_that_share_a_gpu(shop: Workshop, plan: str):
    assert_alike(
        shop.train("blocks", plan, sharing(plan)), shop.train("blocks", plan, on("cpu", plan))
    )


@pytest.mark.slow
def test_ranks_divide_the_memory_of_the_gpu(workshops: Workshops, tmp_path: Path):
    """What fits for one rank of it may not fit for two."""
    with workshops.open(tmp_path, devices=1, memory_bytes=16 << 20) as small:
        assert "error" not in small.ask("wide", "single", "cuda:0", priced=True)
        answer = small.ask("wide", "data=2", "cuda:0,cuda:0", priced=True)
    assert answer["kind"] == "PlanError" and "doesn't fit" in answer["error"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("devices", ["cuda:0,cuda:0", "cpu:0,cuda:0,cuda:0"])
def test_servers_leave_the_gpu_alone(shop: Workshop, devices: str):
    """They are processes of the CPU, named or not, and never touch CUDA."""
    trained = shop.train("blocks", "servers=1 workers=2", devices)
    assert trained.on_cpu == {0: None}
    assert [rank["rank"] for rank in trained.measured] == [1, 2]
    assert trained.summary["devices"] == "cpu:0 (servers) and cuda:0,cuda:0 (workers)"


def test_gloo_is_given_nothing_of_a_gpu(shop: Workshop):
    """Every kind of message between two ranks arrives as on CPUs, and gloo itself refuses tensors of GPUs."""
    for rank in shop.check("exchanged"):
        assert rank["backend"] == "staged"
        assert [name for name, is_alike in rank["alike"].items() if not is_alike] == []
        assert rank["devices"] == ["cpu"]
        assert set(rank["refusals"].values()) == {
            "No backend type associated with device type cuda"
        }
