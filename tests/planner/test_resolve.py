"""A request is settled: which devices the ranks of a plan get."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from paceline.base.errors import PlanError
from paceline.cluster import cluster
from paceline.cluster.accelerators import FreeMemory
from paceline.cluster.cluster import names_of
from paceline.cluster.devices import Device
from paceline.job import Job
from paceline.launch.hosts.environment import Environment
from paceline.planner.devices import devices_of
from paceline.planner.fit import _as_many
from paceline.planner.resolve import Resolved, resolve
from paceline.strategies.plan import Plan

JOB = Job(
    model=lambda: torch.nn.Linear(2, 1),
    data=TensorDataset(torch.zeros(64, 2), torch.zeros(64, 1)),
    loss=F.mse_loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    batch=64,
    steps=1,
)


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight GPUs."""
    devices = [Device("cuda", index, 80 * 2**30, name="H100") for index in range(8)]
    monkeypatch.setattr(cluster, "_gpus", lambda: devices)
    monkeypatch.setattr(cluster, "room", lambda index: FreeMemory(80 * 2**30))
    monkeypatch.setattr(cluster, "cards", lambda: (None,) * 8)


def settled(
    plan: str, devices: str | None = None, environment: Environment | None = None
) -> Resolved:
    return resolve(JOB, plan, devices=devices, environment=environment)


@pytest.mark.parametrize(
    ("plan", "devices", "expected"),
    [
        (
            "servers=2 workers=8",
            None,
            "cpu:0,cpu:1 (servers) and cuda:0,cuda:1,cuda:2,cuda:3,cuda:4,cuda:5,cuda:6,cuda:7 "
            "(workers)",
        ),
        (
            "servers=2 workers=8",
            "cuda:0-7",
            "cpu:0,cpu:1 (servers) and cuda:0,cuda:1,cuda:2,cuda:3,cuda:4,cuda:5,cuda:6,"
            "cuda:7 (workers)",
        ),
        ("servers=1 workers=2", "cuda:0-1,cpu:0", "cpu:0 (servers) and cuda:0,cuda:1 (workers)"),
        ("servers=2 workers=2 colocate=yes", None, "cuda:0,cuda:1"),
        ("servers=1 workers=2", "cpu:0-2", "cpu:0,cpu:1,cpu:2"),
    ],
)
def test_the_devices_of_a_plan(plan: str, devices: str | None, expected: str):
    """Servers take no GPU, unless they are threads of the workers."""
    resolved = settled(plan, devices)
    assert resolved.devices == expected
    assert len(resolved.cluster.devices) == resolved.plan.world_size


@pytest.mark.parametrize(
    ("plan", "devices", "message"),
    [
        (
            "servers=1 workers=2",
            "cuda:0-2",
            "has 2 workers here and --devices names 3 GPUs(?s:.*)--devices cuda:0,cuda:1",
        ),
        (
            "servers=1 workers=4",
            "cuda:0-2",
            "has 4 workers here and --devices names 3 GPUs(?s:.*)--devices cuda:0-3",
        ),
        ("data=2", "cuda:0-3", "needs 2 devices here and --devices names 4"),
    ],
)
def test_devices_that_a_plan_has_no_use_for(plan: str, devices: str, message: str):
    with pytest.raises(PlanError, match=message):
        settled(plan, devices)


def under_torchrun(rank: int, *, local_world_size: int = 5) -> Environment:
    """Two hosts."""
    return Environment("torchrun", rank, 10, rank % local_world_size, local_world_size, "host", 1)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (1, "cpu:0,cpu:1 (servers) and cuda:0,cuda:1,cuda:2 (workers)"),
        (7, "cuda:0,cuda:1,cuda:2,cuda:3,cuda:4"),
    ],
)
def test_servers_are_ranks_of_the_first_host(rank: int, expected: str):
    resolved = settled("servers=2 workers=8", environment=under_torchrun(rank))
    assert resolved.devices == expected
    if rank == 1:
        assert [device.kind for device in devices_of(resolved.plan, resolved.cluster)] == [
            "cpu"
        ] * 2 + ["cuda"] * 8


def test_other_plans_are_for_gpus_alone():
    """Where a plan with servers doesn't fit, the others are not given its servers' CPUs."""
    resized = _as_many(settled("servers=2 workers=2").cluster, Plan.parse("shard=4"))
    assert names_of(resized.devices) == "cuda:0,cuda:1,cuda:2,cuda:3"
