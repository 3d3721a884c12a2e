"""Gathers parameters in the precision to which autocast casts them: half of the bytes with the same
bits.

FSDP2 gathers a unit in one dtype, and reduces its gradients in one dtype. Here each parameter has
its own dtype, because a unit may have weights of products, and also weights of norms, which
autocast leaves in float32. Gradients are cast to float32 as soon as they are made, as in the
backward of autocast's own cast.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

import torch

from paceline.torch_private.fsdp import groups_of, was_gathered
from paceline.torch_private.fsdp_parameter import FSDPParam

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


class _Cast(FSDPParam):
    """A parameter that is cast before it is gathered."""

    cast_dtype: torch.dtype  # the dtype to which it is cast

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        super().init_dtype_attrs(mp_policy)
        self.param_dtype = self.cast_dtype

    def init_unsharded_param(self) -> None:
        is_first = not was_gathered(self)
        super().init_unsharded_param()
        if is_first:
            self.unsharded_param.grad_dtype = self.orig_dtype

    @property
    def unsharded_zero_grad_data(self) -> torch.Tensor:
        return super().unsharded_zero_grad_data.to(self.orig_dtype)


def gather_in(dtype: torch.dtype, module: FSDPModule, parameters: Set[torch.Tensor]) -> None:
    """Cast these shards of a module before they are gathered. Call it before the first forward."""
    for group in groups_of(module):
        for parameter in group.fsdp_params:
            if parameter.sharded_param in parameters:
                parameter.__class__, parameter.cast_dtype = _Cast, dtype
