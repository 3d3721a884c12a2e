"""Ranks are held to the memory that their device is given, and say so when it doesn't suffice."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch

from paceline.base.errors import OutOfMemory
from paceline.cluster.cluster import Cluster
from paceline.launch.local.ranks import run_local
from paceline.launch.process.failure import RankFailed
from paceline.launch.process.memory_limit import limited_to

pytestmark = [pytest.mark.usefixtures("nothing_left")]

MIB = 2**20


def takes(*num_bytes: int) -> Any:
    """A body whose ranks each take so much memory, and give it back."""

    def body(context: Any) -> int:
        return int(torch.ones(num_bytes[context.rank], dtype=torch.uint8).numel())

    return body


def test_a_rank_within_its_limit():
    """Each rank may use what its own device is given."""
    devices = Cluster.local("cpu:0-1", memory="64MiB,512MiB").devices
    assert run_local(takes(60 * MIB, 500 * MIB), devices) == [60 * MIB, 500 * MIB]


def test_a_rank_beyond_its_limit():
    """It fails with the exit code of memory, and its message has limit and way out."""
    devices = Cluster.local("cpu:0-1", memory="512MiB,64MiB").devices
    with pytest.raises(
        RankFailed, match=r"more than its limit of 64 MiB(?s:.*)hint: .*--memory"
    ) as caught:
        # More than the heap of a process that has run other tests may have kept free.
        run_local(takes(500 * MIB, 1024 * MIB), devices)
    assert (caught.value.exit_code, caught.value.failure.rank) == (OutOfMemory.exit_code, 1)


def test_what_python_takes_counts_too():
    """Memory is limited whoever asks for it."""

    def body(context: Any) -> int:
        return len(bytearray(200 * MIB))

    with pytest.raises(RankFailed, match="limit of 16 MiB: MemoryError"):
        run_local(body, Cluster.local("cpu:0", memory="16MiB").devices)


def test_other_errors_pass_and_the_limit_ends():
    """The limit changes nothing about errors of another kind, and does not outlive its block."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with (
        pytest.raises(ValueError, match="no"),
        limited_to(Cluster.local("cpu:0", memory="1GiB").devices[0]),
    ):
        assert resource.getrlimit(resource.RLIMIT_DATA) != before
        raise ValueError("no")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_without_a_limit_nothing_is_limited():
    """What a device has by itself is not enforced."""
    with limited_to(Cluster.local("cpu:0").devices[0]):
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
