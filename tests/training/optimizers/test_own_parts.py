"""Elementwise optimizers see plain tensors under shard=N and tensor=N, and their state goes on under other plans."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs.optimizers import furthest, optimizer_job, train, train_in_legs
from torch import nn

from paceline.base.errors import JobError
from paceline.training.optimizers.local_shards import as_distributed, as_plain
from paceline.training.optimizers.state import OptimizerState

EXACT = 1e-12

OPTIMIZERS: dict[str, Any] = {
    "fused adam": partial(torch.optim.Adam, fused=True),
    "foreach sgd": partial(torch.optim.SGD, momentum=0.9, foreach=True),
    "rprop": torch.optim.Rprop,
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["shard=3", "tensor=2", "pipeline=2 shard=2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_is_that_of_one_device(name: str, plan: str, tmp_path: Path) -> None:
    """torch's distributed tensors refuse these updates."""
    job = optimizer_job(lambda named: OPTIMIZERS[name](named, lr=1e-2))
    assert furthest(train(job, plan, tmp_path / "run"), train(job, "single", tmp_path / "one")) < (
        EXACT,
        "",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "legs",
    [
        [("shard=2", 3), ("single", 7)],
        pytest.param(
            [("shard=2", 1), ("tensor=2", 3), ("shard=3", 5), ("single", 7)], marks=pytest.mark.slow
        ),
    ],
)
def test_it_goes_on_under_other_plans(legs: list[tuple[str, int]], tmp_path: Path) -> None:
    """A rank writes its part of the state, and reads whatever part it has then."""
    job = optimizer_job(lambda named: torch.optim.Adam(named, lr=1e-2, fused=True))
    weights = train_in_legs(job, legs, tmp_path / "run")
    assert furthest(weights, train(job, "single", tmp_path / "one")) < (EXACT, "")


def test_state_inside_lists_is_found() -> None:
    """What has the shape of a rank's part becomes distributed, and plain again; what is no part stays as it is."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    part, count = torch.ones(2, 3), torch.zeros(())
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        parameter = DTensor.from_local(
            torch.zeros(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False
        )
        distributed = as_distributed([part, {"a": (count, part, 3)}], parameter)
        plain = as_plain(distributed)
    finally:
        dist.destroy_process_group()

    for tensor in (distributed[0], distributed[1]["a"][1]):
        assert isinstance(tensor, DTensor) and tensor.shape == (4, 3)
    assert distributed[1]["a"][0] is count and distributed[1]["a"][2] == 3
    for tensor in (plain[0], plain[1]["a"][1]):
        assert (
            not isinstance(tensor, DTensor)
            and tensor.data_ptr() == part.data_ptr()
            and tensor.shape == (2, 3)
        )
    assert plain[1]["a"][0] is count and isinstance(plain[1]["a"], tuple) and plain[1]["a"][2] == 3
    assert isinstance(as_plain(nn.Parameter(torch.ones(2))), nn.Parameter)


def test_quantized_state_is_refused_by_name() -> None:
    """A tensor that consists of others fits into no checkpoint, and the optimizer, key and parameter are named."""
    from torchao.optim.subclass_8bit import OptimState8bit

    weight = nn.Parameter(torch.zeros(256, 256))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight]["exp_avg"] = OptimState8bit.zeros((256, 256))
    with pytest.raises(JobError, match="SGD keeps 'exp_avg' of 'table' as OptimState8bit"):
        list(OptimizerState(optimizer, {"table": weight}).by_parameter("table"))
