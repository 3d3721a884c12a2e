"""Replicas whose gradients are summed in buckets: over the network while backward goes on, or in shared memory.

Why not DistributedDataParallel: it rebuilds its buckets after the first backward, which moves a resumed run by a
rounding, and it is wrong or refused together with tensor and pipeline axes. The buckets here are fixed before
the first step and hold whatever gradients the rank has, whole or a shard, so any axis can stand inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.capture.probe import NOTHING, Observed
from paceline.launch.logs import logger
from paceline.strategies.compress.run import Compressed
from paceline.strategies.data.arrivals import Arrivals
from paceline.strategies.data.buckets import assign
from paceline.strategies.data.reduce import Reduction, reduction
from paceline.strategies.data.sparse import SparseGradients, sparse_parameters
from paceline.strategies.kept import Kept, Saved

if TYPE_CHECKING:
    from torch import nn

    from paceline.plans import Plan
    from paceline.strategies.mesh import Mesh


IMPORTS: tuple[str, ...] = ()


def is_active(plan: Plan) -> bool:
    return plan.axes.data > 1 and plan.outer_steps is None


def prepare(model: nn.Module, *, plan: Plan, mesh: Mesh, observed: Observed = NOTHING,
            device: torch.device | None = None) -> GradientBuckets:
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if plan.modifiers.compress != "none" and (apart := sorted(observed.sparse & trainable.keys())):
        logger.info("sparse gradients are not compressed: %s", ", ".join(apart))
    return GradientBuckets(trainable, mesh.group("data"), compress=plan.modifiers.compress,
                           replica=mesh.coordinates["data"], sparse=observed.sparse)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds; the tensor itself if it is not distributed."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class GradientBuckets:
    """Sums gradients over a group. Buckets leave in one fixed order on every rank, whatever order backward takes.

    Gradients of whole parameters live in the buckets, so they are neither held twice nor copied; those of shards
    are copied in and out. Compressed, a sum leaves something out on each replica, which belongs to the run's state.
    Sparse gradients are in no bucket; they are summed at the end, and never compressed.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, *, compress: str = "none",
                 replica: int = 0, sparse: frozenset[str] = frozenset()) -> None:
        """sparse: names of parameters whose gradients are sparse."""
        apart = sparse_parameters(parameters, sparse)
        parameters = {name: p for name, p in parameters.items() if name not in apart}
        self.group, self.replica, self.sparse = group, replica, SparseGradients(list(apart.values()), group)
        self.names = {p: name for name, p in parameters.items()}
        held = list(parameters.values())
        sizes = [local(p).numel() * p.element_size() for p in held]
        # Shards come on the stream on which they were reduced, whole gradients on that of backward: one that waits for
        # the last to come must not hold the other kind.
        kinds = [(p.dtype, p.device, _is_distributed(p)) for p in held]
        self.buckets = [[held[i] for i in bucket] for bucket in assign(sizes, kinds)]
        self.bucket_of = {parameter: k for k, bucket in enumerate(self.buckets) for parameter in bucket}
        self.reduction = reduce_buckets([[local(p) for p in bucket] for bucket in self.buckets], group,
                                        compress=compress)
        self.memory = self.reduction.memory
        self.views = {p: view for bucket, flat in zip(self.buckets, self.memory, strict=True)
                      for p, view in zip(bucket, views(bucket, flat), strict=True)}
        self.missing: list[int] = []
        self.arrivals = Arrivals(self.names.__getitem__,  # type: ignore[arg-type]
                                 lambda p: self.bucket_of[p] < self.started)  # type: ignore[index]
        self.started = 0
        self.armed = self.begun = False
        for parameter in held:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def begin(self, *, last: bool) -> None:
        if not self.begun:
            self.begun = True
            self.arrivals.begin()
            self.missing = [len(bucket) for bucket in self.buckets]
            if self.memory:
                torch._foreach_zero_(self.memory)
            for parameter, view in self.views.items():
                if not _is_distributed(parameter):
                    parameter.grad = view
        self.armed = last

    def unused(self) -> set[str]:
        """Whole parameters in buckets that no backward of this rank reached since the last `finish`."""
        return {name for p, name in self.names.items() if self.begun and p not in self.arrivals.arrived
                and not _is_distributed(p)}

    @property
    def sent_bytes(self) -> float:
        """What this rank has sent so far."""
        return self.reduction.sent_bytes + self.sparse.sent_bytes

    def kept(self) -> Iterator[Kept]:
        """What the sums so far left out here, and the factors that the next ones start from."""
        if isinstance(self.reduction, Compressed):
            for number, residual in self.reduction.method.residuals.items():
                for p, left in zip(self.buckets[number], views(self.buckets[number], residual), strict=True):
                    yield Kept(f"residuals/{self.replica}/{self.names[p]}", left, like=self.names[p], replica=True)
            for (number, index), factor in self.reduction.method.factors.items():
                yield Kept(f"factors/{self.names[self.buckets[number][index]]}", factor)

    def restore(self, saved: Saved) -> list[str]:
        """What was left out is owed to the model: other numbers of replicas share its sum."""
        replicas, there = dist.get_world_size(self.group), saved.replicas("residuals")
        kept = list(self.kept())
        for one in kept:
            if one.name in saved and (not one.replica or there == replicas):
                one.tensor.copy_(saved.read(one.name, one.like))
            elif one.replica and there:
                sums = [saved.read(f"residuals/{number}/{one.like}", one.like) for number in range(there)]
                one.tensor.copy_(torch.stack(sums).sum(0) / replicas)
        if there in (0, replicas) or not any(one.replica for one in kept):
            return []
        return [f"what {there} replicas had not sent yet of their gradients is shared by {replicas}"]

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self.arrivals.add(parameter, last=self.armed) and self.reduction.overlaps:
            self.missing[self.bucket_of[parameter]] -= 1  # type: ignore[index]
            while self.started < len(self.buckets) and not self.missing[self.started]:
                self._start_next()

    def _start_next(self) -> None:
        for parameter in self.buckets[self.started]:
            gradient, view = parameter.grad, self.views[parameter]
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                view.copy_(local(gradient))
        self.reduction.start(self.started)
        self.started += 1

    def finish(self) -> None:
        """Wait for every bucket; a gradient that never came (an unused parameter) counts as zero."""
        self.armed = self.begun = False
        self.arrivals.end()
        while self.started < len(self.buckets):
            self._start_next()
        self.started = 0
        self.reduction.finish()
        for parameter, view in self.views.items():
            if not _is_distributed(parameter):
                parameter.grad = view
            else:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local(parameter.grad).copy_(view)
        self.sparse.finish()


def reduce_buckets(buckets: Sequence[Sequence[torch.Tensor]], group: dist.ProcessGroup, *,
                   compress: str) -> Reduction:
    """What sums buckets of such tensors over a group, in some form. Collective."""
    like = [bucket[0] for bucket in buckets]
    if compress == "none":
        return reduction(like, [sum(tensor.numel() for tensor in bucket) for bucket in buckets], group)
    return Compressed(compress, like, [[_as_matrix(tensor) for tensor in bucket] for bucket in buckets], group)


def _as_matrix(tensor: torch.Tensor) -> tuple[int, ...]:
    """(rows, columns) as they lie in memory, of a tensor with more than one dim."""
    sizes = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    return (sizes[0][1], math.prod(size for _, size in sizes[1:])) if len(sizes) > 1 else tuple(tensor.shape)


def _is_distributed(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")


def views(bucket: Sequence[torch.Tensor], flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """A part of the bucket for each gradient, with the strides of its parameter, as backward gives them: fused
    optimizers walk through both alike."""
    for parameter, part in zip(bucket, flat.split([local(p).numel() for p in bucket]), strict=True):
        strides = torch.empty_like(local(parameter), device="meta").stride()
        yield part.as_strided(local(parameter).shape, strides, part.storage_offset())
