"""`torch_private/process_groups.py`: groups beside torch's default one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from paceline.torch_private.process_groups import (
    all_gather,
    gloo_on_loopback,
    nccl,
    reduce_scatter,
    send_over,
)

TIMEOUT = timedelta(seconds=90)


def test_gloo_groups_need_no_default_group():
    group = gloo_on_loopback(dist.HashStore(), 0, 1, TIMEOUT)
    tensor = torch.arange(3.0)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [0, 1, 2] and not dist.is_initialized()
    assert group.options._timeout == TIMEOUT


def test_a_group_sends_over_a_backend():
    """In the way in which `launch/process/shared_gpu.py` has it carry messages of GPUs."""
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    send_over(group, dist.ProcessGroupGloo(store, 0, 1, timeout=TIMEOUT))
    whole, part = torch.zeros(2), torch.ones(2)
    all_gather(group, whole, part, AllgatherOptions()).wait()
    assert whole.tolist() == [1, 1]
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.SUM
    reduce_scatter(group, part, torch.full((2,), 3.0), options).wait()
    assert part.tolist() == [3, 3]
    tensor = torch.ones(1)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    assert tensor.item() == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nccl_groups_need_no_default_group():
    group = nccl(dist.HashStore(), 0, 1, TIMEOUT)
    tensor = torch.arange(3.0, device="cuda")
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [0, 1, 2]
    group.abort()
