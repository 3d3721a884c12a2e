"""A GPU that fails is left out, and a spare one takes its place."""

from __future__ import annotations

import pytest
from pretended_cuda.client import Workshop

from tests.devices.test_pretended_cuda import assert_alike

pytestmark = pytest.mark.timeout(600)  # the first one builds the device


@pytest.fixture(scope="module")
def num_gpus() -> int:
    return 3


@pytest.mark.parametrize("devices", [None, "cuda:0-2"])
def test_a_spare_takes_the_place_of_a_gpu_that_fails(shop: Workshop, devices: str | None):
    """The run goes on by itself from the copies in memory, and ends as one device does."""
    before = len(shop.printed())
    trained = shop.train("fails on one GPU", "data=2", devices, spares=1)  # type: ignore[arg-type]
    assert_alike(trained, shop.train("fails on one GPU", "single", "cpu:0"))
    printed = shop.printed()[before:]
    assert (
        "rank 1: its GPU failed: RuntimeError: CUDA error: uncorrectable ECC error encountered; "
        "cuda:2 takes the place of cuda:1 (0 spares left); all ranks start again" in printed
    )
    assert [rank["devices"] for rank in trained.measured] == [["cuda:0"], ["cuda:2"]]
    assert trained.first_use is None, (
        f"the process that forks ranks began to use CUDA: {trained.first_use}"
    )


def test_without_a_spare_the_run_ends_with_what_to_do(shop: Workshop):
    answer = shop.ask("fails on one GPU", "data=2", "cuda:0-1")
    assert "uncorrectable ECC error" in answer["error"] and "--spares N" in answer["error"]


def test_too_few_gpus_are_refused(shop: Workshop):
    answer = shop.ask("blocks", "data=2", "cuda:0-2", spares=3)
    assert "--spares 3 beside 1 ranks needs 4 GPUs, and there are 3" in answer["error"]
