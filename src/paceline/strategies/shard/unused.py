"""Ranks may use different parameters of a unit, such as experts: all parameters take part in its reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def reduce_unused(module: FSDPModule) -> None:
    """Reduce zeros for parameters of a unit that this rank's backward does not use."""
    if hasattr(module, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    group = module._get_fsdp_state()._fsdp_param_group
    if group is not None:
        _put_zeros_first(group)


def _put_zeros_first(group: Any) -> None:
    """For torch before 2.13, whose groups reduce what has a gradient: the sizes of ranks' messages would differ then,
    which ends them."""
    post_backward = group.post_backward

    def with_zeros(*unused: Any) -> None:
        for parameter in group.fsdp_params if group.reduce_grads else ():
            if (hasattr(parameter, "_unsharded_param") and parameter.unsharded_param.requires_grad
                    and parameter.unsharded_param.grad is None and parameter.unsharded_accumulated_grad is None):
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
        post_backward(*unused)

    group.post_backward = with_zeros
