"""`torch_private/fsdp.py` and `fsdp_parameter.py`: groups of FSDP2, and how they are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paceline.torch_private.fsdp import end_backward, groups_of, was_gathered
from paceline.torch_private.fsdp_parameter import FSDPParam


@pytest.fixture
def model() -> Iterator[Any]:
    """Sharded over the only rank: a layer, and what is beside it."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1)))
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
        yield model
    finally:
        dist.destroy_process_group()


def test_a_module_has_a_group_of_its_own_parameters(model: Any):
    """Without those of modules inside that are sharded by themselves."""
    (group,) = groups_of(model)
    shards = [parameter.sharded_param for parameter in group.fsdp_params]
    assert {id(shard) for shard in shards} == {id(p) for p in model[1].parameters()}
    assert len(groups_of(model[0])) == 1
    assert all(type(parameter) is FSDPParam for parameter in group.fsdp_params)
    assert group.reduce_grads and callable(group.post_backward)


def test_parameters_are_gathered_by_the_first_forward(model: Any):
    (parameter, _) = groups_of(model[0])[0].fsdp_params
    assert not was_gathered(parameter)
    model(torch.ones(1, 2))
    assert was_gathered(parameter) and parameter.unsharded_param.shape == (3, 2)


def test_a_backward_that_was_not_ended_can_be_ended(model: Any):
    """It reduces gradients that were left whole."""
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(True)
    end_backward(model)
    assert all(p.grad is not None for p in model.parameters())


def test_a_class_of_parameters_can_choose_the_dtype_of_its_gather(model: Any):
    """By the methods that `strategies/shard/gathers.py` overrides."""

    class Cast(FSDPParam):
        def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
            super().init_dtype_attrs(mp_policy)
            self.param_dtype = torch.bfloat16

        def init_unsharded_param(self) -> None:
            is_first = not was_gathered(self)
            super().init_unsharded_param()
            if is_first:
                self.unsharded_param.grad_dtype = self.orig_dtype

        @property
        def unsharded_zero_grad_data(self) -> torch.Tensor:
            return super().unsharded_zero_grad_data.to(self.orig_dtype)

    weight, _ = groups_of(model[0])[0].fsdp_params
    weight.__class__ = Cast
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(1, 2)).sum().backward()
    assert seen == [torch.bfloat16] and model[0].weight.grad.dtype == torch.float32
