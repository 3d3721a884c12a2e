"""Lets all parameters of a unit take part in its reduction, because ranks may use different ones,
such as experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.torch_private.fsdp import groups_of, was_gathered

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def reduce_unused(module: FSDPModule) -> None:
    """Reduce zeros for parameters of a unit that this rank's backward does not use."""
    if hasattr(module, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in groups_of(module):
        _put_zeros_first(group)


def _put_zeros_first(group: Any) -> None:
    """Set missing gradients to zero before a group reduces them, for torch before 2.13.

    Its groups reduce only parameters with a gradient. The messages of ranks would then differ in
    size, and the ranks would fail.
    """
    post_backward = group.post_backward

    def with_zeros(*unused: Any) -> None:
        for parameter in group.fsdp_params if group.reduce_grads else ():
            if (
                was_gathered(parameter)
                and parameter.unsharded_param.requires_grad
                and parameter.unsharded_param.grad is None
                and parameter.unsharded_accumulated_grad is None
            ):
                whole = parameter.unsharded_param
                whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)
        post_backward(*unused)

    group.post_backward = with_zeros
