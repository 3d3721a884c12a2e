"""Replicas whose gradients meet by all-reduce, in buckets, while backward goes on.

Why not DistributedDataParallel: it rebuilds its buckets after the first backward, which moves a resumed run by a
rounding, and it is wrong or refused together with tensor and pipeline axes. The buckets here are fixed before
the first step and hold whatever gradients the rank has, whole or a shard, so any axis can stand inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.strategies.data.buckets import assign

if TYPE_CHECKING:
    from torch import nn

    from paceline.plan import Plan
    from paceline.strategies.mesh import Mesh


IMPORTS: tuple[str, ...] = ()


def is_active(plan: Plan) -> bool:
    return plan.axes.data > 1


def prepare(model: nn.Module, *, plan: Plan, mesh: Mesh) -> GradientBuckets:
    return GradientBuckets([p for p in model.parameters() if p.requires_grad], mesh.group("data"))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds; the tensor itself if it is not distributed."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class GradientBuckets:
    """Sums gradients over a group. Buckets leave in one fixed order on every rank, whatever order backward takes."""

    def __init__(self, parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        self.group = group
        sizes = [local(p).numel() * p.element_size() for p in parameters]
        self.buckets = [[parameters[i] for i in bucket]
                        for bucket in assign(sizes, [(p.dtype, p.device) for p in parameters])]
        self.bucket_of = {parameter: k for k, bucket in enumerate(self.buckets) for parameter in bucket}
        self.missing: list[int] = []
        self.works: list[tuple[dist.Work, torch.Tensor]] = []
        self.armed = False
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def begin(self, *, last: bool) -> None:
        self.armed = last
        if last:
            self.missing = [len(bucket) for bucket in self.buckets]
            self.works = []

    def unused(self) -> set[str]:
        """None: a parameter that this rank did not use has no gradient before `finish`."""
        return set()

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self.armed:
            self.missing[self.bucket_of[parameter]] -= 1  # type: ignore[index]
            while len(self.works) < len(self.buckets) and self.missing[len(self.works)] <= 0:
                self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self.buckets[len(self.works)]
        flat = torch.cat([_flat_gradient(parameter) for parameter in bucket])
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.works.append((work, flat))

    def finish(self) -> None:
        """Wait for every bucket; a gradient that never came (an unused parameter) counts as zero."""
        self.armed = False
        while len(self.works) < len(self.buckets):
            self._reduce_next()
        for (work, flat), bucket in zip(self.works, self.buckets, strict=True):
            work.wait()
            for parameter, summed in zip(bucket, flat.split([local(p).numel() for p in bucket]), strict=True):
                _set_gradient(parameter, summed)
        self.works = []


def _flat_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient's elements in the order in which the parameter keeps its own in memory."""
    held = local(parameter)
    if parameter.grad is None:
        return torch.zeros_like(held, memory_format=torch.contiguous_format).flatten()
    gradient = local(parameter.grad)
    if held.is_contiguous():
        return gradient.flatten()
    return torch.empty_like(held).copy_(gradient).as_strided((held.numel(),), (1,))


def _set_gradient(parameter: torch.nn.Parameter, summed: torch.Tensor) -> None:
    """Make the reduced values the gradient: as a view of the bucket, or in place inside a distributed tensor.

    The view has the strides of the parameter, as backward gives them: fused optimizers walk through both alike.
    """
    held: Any = parameter.grad
    if held is not None and hasattr(held, "to_local"):
        held.to_local().copy_(summed.view_as(local(parameter)))
    elif hasattr(parameter, "to_local"):
        parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).copy_(summed.view_as(local(parameter)))
    elif parameter.is_contiguous():
        parameter.grad = summed.view_as(parameter)
    else:
        strides = torch.empty_like(parameter, device="meta").stride()
        parameter.grad = summed.as_strided(parameter.shape, strides, summed.storage_offset())
