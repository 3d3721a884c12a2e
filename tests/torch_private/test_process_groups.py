"""`torch_private/process_groups.py`: groups beside torch's default one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.torch_private.process_groups import gloo_on_loopback, nccl, send_over

TIMEOUT = timedelta(seconds=90)


def test_gloo_groups_need_no_default_group():
    group = gloo_on_loopback(dist.HashStore(), 0, 1, TIMEOUT)
    tensor = torch.arange(3.0)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [0, 1, 2] and not dist.is_initialized()
    assert group.options._timeout == TIMEOUT


def test_a_group_sends_over_a_backend():
    store = dist.HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    send_over(group, dist.ProcessGroupGloo(store, 0, 1, timeout=TIMEOUT))
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
