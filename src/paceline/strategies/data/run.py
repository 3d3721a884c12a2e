"""Replicas that sum their gradients in buckets: over the network during backward, or in shared
memory.

DistributedDataParallel is not used, for two reasons. It rebuilds its buckets after the first
backward, so that a resumed run differs by rounding. Together with tensor and pipeline axes it is
wrong or raises an error. The buckets here are fixed before the first step and hold the gradients of
the rank, whole or sharded, so that any axis can be nested inside.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.base.logs import logger
from paceline.model.forward_effects import NOTHING, ForwardEffects
from paceline.strategies.compress.run import Compressed
from paceline.strategies.data.arrivals import GradientArrivals
from paceline.strategies.data.buckets import assign
from paceline.strategies.data.reduce import Reduction, Uncompressed
from paceline.strategies.data.sparse import SparseGradients, sparse_parameters
from paceline.strategies.mesh import local_part
from paceline.strategies.state_tensors import SavedState, StateTensor
from paceline.strategies.synchroniser import Synchroniser

if TYPE_CHECKING:
    from torch import nn

    from paceline.strategies.mesh import Mesh
    from paceline.strategies.plan import Plan


def prepare(
    model: nn.Module,
    *,
    plan: Plan,
    mesh: Mesh,
    observed: ForwardEffects = NOTHING,
    **_: Any,
) -> GradientBuckets | None:
    """Return the buckets of a model's gradients; None for a model that is not trained."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        return None
    if plan.modifiers.compress != "none" and (apart := sorted(observed.sparse & trainable.keys())):
        logger.info("sparse gradients are not compressed: %s", ", ".join(apart))
    return GradientBuckets(
        trainable,
        mesh.group("data"),
        compress=plan.modifiers.compress,
        replica=mesh.coordinates["data"],
        sparse=observed.sparse,
    )


class GradientBuckets(Synchroniser):
    """Sums gradients over a group. Buckets are sent in one fixed order on every rank, whatever the
    order of backward.

    Gradients of whole parameters are views of the buckets, so that they are neither held twice nor
    copied. Gradients of shards are copied in and out. On GPUs each operator costs host time. There,
    the backward of a single micro-batch creates new gradients instead of adding to zeros, and the
    gradients of a bucket are copied together when the last one has arrived.

    A compressed sum leaves values out on each replica. They belong to the run's state. Sparse
    gradients are in no bucket. They are summed at the end, and never compressed.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        compress: str = "none",
        replica: int = 0,
        sparse: frozenset[str] = frozenset(),
    ) -> None:
        """Assign the gradients of parameters to buckets.

        sparse: names of parameters with sparse gradients.
        """
        apart = sparse_parameters(parameters, sparse)
        parameters = {name: p for name, p in parameters.items() if name not in apart}
        self.group, self.replica, self.sparse = (
            group,
            replica,
            SparseGradients(list(apart.values()), group),
        )
        self.names, self.parameters = list(parameters), list(parameters.values())
        trained, self.is_part = self.parameters, [hasattr(p, "to_local") for p in self.parameters]
        # Gradients of shards arrive on the stream on which they were reduced, and whole gradients
        # on that of backward. A bucket that waits for the last gradient of one kind must not delay
        # gradients of the other kind.
        kinds = [
            (p.dtype, p.device, is_part) for p, is_part in zip(trained, self.is_part, strict=True)
        ]
        self.indices, self.reduction, self.views = bucketed(
            trained, kinds, group, compress=compress
        )
        self.buckets = [[trained[index] for index in bucket] for bucket in self.indices]
        self.bucket_of = {
            index: number for number, bucket in enumerate(self.indices) for index in bucket
        }
        self.memory = self.reduction.memory
        placed = list(zip(trained, self.views, self.is_part, strict=True))
        self.whole = [(p, view) for p, view, is_part in placed if not is_part]
        self.parts = [(p, view) for p, view, is_part in placed if is_part]
        self.missing = [len(bucket) for bucket in self.buckets]
        self.arrivals = GradientArrivals(
            self.names.__getitem__, lambda index: not self.missing[self.bucket_of[index]]
        )
        self.started = 0
        self.armed = self.begun = False
        # If shards and whole gradients arrive on two streams, a hook on one stream may start a
        # bucket of the other.
        self.filled = (
            [torch.cuda.Event() for _ in self.buckets]
            if self.whole and self.parts and self.memory[0].is_cuda
            else []
        )
        self.copies = self.reduction.overlaps and all(
            flat.device.type != "cpu" for flat in self.memory
        )
        for index, parameter in enumerate(trained):
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))

    def begin(self, *, last: bool) -> None:
        if not self.begun:
            self.begun = True
            self.arrivals.begin()
            # In the first window, no bucket is known to be complete before the end, so that all
            # gradients would be held twice. The same holds if later micro-batches add to the
            # gradients of the first.
            if not (last and self.copies) or self.arrivals.is_first:
                if self.memory:
                    torch._foreach_zero_(self.memory)
                for parameter, view in self.whole:
                    parameter.grad = view
        self.armed = last

    def unused(self) -> set[str]:
        """Return the names of whole parameters in buckets that no backward has reached since
        `finish`."""
        if not self.begun or len(self.arrivals.arrived) == len(self.names):
            return set()
        return {
            name
            for index, name in enumerate(self.names)
            if index not in self.arrivals.arrived and not self.is_part[index]
        }

    @property
    def sent_bytes(self) -> float:
        """The bytes that this rank has sent so far."""
        return self.reduction.sent_bytes + self.sparse.sent_bytes

    def kept(self) -> Iterator[StateTensor]:
        """Yield the values that past sums left out on this rank, and the factors for the next
        sums."""
        if isinstance(self.reduction, Compressed):
            for number, residual in self.reduction.method.residuals.items():
                residual_views = views(self.buckets[number], residual)
                for index, residual_view in zip(self.indices[number], residual_views, strict=True):
                    name = self.names[index]
                    yield StateTensor(
                        f"residuals/{self.replica}/{name}", residual_view, like=name, replica=True
                    )
            for (number, index), factor in self.reduction.method.factors.items():
                yield StateTensor(f"factors/{self.names[self.indices[number][index]]}", factor)

    def restore(self, saved: SavedState) -> list[str]:
        """Restore the values that past sums left out.

        If the number of replicas has changed, the new replicas share the sum of these values.
        """
        replicas, saved_replicas = dist.get_world_size(self.group), saved.replicas("residuals")
        kept = list(self.kept())
        for residual in kept:
            if residual.name in saved and (not residual.replica or saved_replicas == replicas):
                residual.tensor.copy_(saved.read(residual.name, residual.like))
            elif residual.replica and saved_replicas:
                residuals = [
                    saved.read(f"residuals/{number}/{residual.like}", residual.like)
                    for number in range(saved_replicas)
                ]
                residual.tensor.copy_(torch.stack(residuals).sum(0) / replicas)
        if saved_replicas in (0, replicas) or not any(residual.replica for residual in kept):
            return []
        return [
            f"what {saved_replicas} replicas had not sent yet of their gradients is shared by {replicas}"
        ]

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # a hook of the user has removed it
            return
        if self.arrivals.add(index, last=self.armed) and self.reduction.overlaps:
            number = self.bucket_of[index]
            self.missing[number] -= 1
            if not self.missing[number]:
                self._fill(number)
                while self.started < len(self.buckets) and not self.missing[self.started]:
                    self._start_next()

    @torch.no_grad()
    def _fill(self, number: int) -> None:
        """Copy a bucket's gradients to its memory, if backward has created them elsewhere."""
        filled, gradients = [], []
        for index in self.indices[number]:
            parameter, view = self.parameters[index], self.views[index]
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                filled.append(view)
                gradients.append(
                    local_part(gradient)
                    if gradient.layout is torch.strided
                    else gradient.to_dense()
                )
                if not self.is_part[index]:
                    parameter.grad = view
        if filled:
            torch._foreach_copy_(filled, gradients)
        if self.filled:
            self.filled[number].record()

    def _start_next(self) -> None:
        if self.filled:
            self.filled[self.started].wait()
        self.reduction.start(self.started)
        self.started += 1

    def finish(self) -> None:
        """Wait for every bucket.

        The gradient of an unused parameter, which never arrived, counts as zero.
        """
        self.armed = self.begun = False
        self.arrivals.end()
        while self.started < len(self.buckets):
            if self.missing[self.started]:
                self._fill(self.started)
            self._start_next()
        self.started, self.missing = 0, [len(bucket) for bucket in self.buckets]
        self.reduction.finish()
        for parameter, view in self.whole:
            if parameter.grad is not view:
                parameter.grad = view
        if self.parts:
            gradients = []
            for parameter, _ in self.parts:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(local_part(parameter.grad))
            torch._foreach_copy_(gradients, [view for _, view in self.parts])
        self.sparse.finish()


def bucketed(
    tensors: Sequence[torch.Tensor],
    kinds: Sequence[Hashable],
    group: dist.ProcessGroup,
    *,
    compress: str,
) -> tuple[list[list[int]], Reduction, list[torch.Tensor]]:
    """Put what is to be summed over a group into buckets, compressed or not. Collective.

    Args:
        tensors: Each has the shape and the strides of what is summed.
        kinds: See `buckets.assign`.

    Returns:
        The indices of each bucket, the reduction that sums them, and the part of its memory for
        each tensor.
    """
    parts = [local_part(tensor) for tensor in tensors]
    indices = assign([part.nbytes for part in parts], kinds)
    buckets = [[parts[index] for index in bucket] for bucket in indices]
    like = [bucket[0] for bucket in buckets]
    reduction: Reduction
    if compress == "none":
        sizes = [sum(part.numel() for part in bucket) for bucket in buckets]
        reduction = Uncompressed(like, sizes, group)
    else:
        shapes = [[_as_matrix(part) for part in bucket] for bucket in buckets]
        reduction = Compressed(compress, like, shapes, group)
    of_index = {
        index: view
        for bucket, flat in zip(indices, reduction.memory, strict=True)
        for index, view in zip(bucket, views([parts[i] for i in bucket], flat), strict=True)
    }
    return indices, reduction, [of_index[index] for index in range(len(parts))]


def _as_matrix(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape as (rows, columns) in memory order; its own shape if it has one dim
    or none."""
    sizes = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    return (
        (sizes[0][1], math.prod(size for _, size in sizes[1:]))
        if len(sizes) > 1
        else tuple(tensor.shape)
    )


def views(bucket: Sequence[torch.Tensor], flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the part of the bucket for each gradient, with the strides of its parameter.

    Backward makes gradients with these strides, and fused optimizers iterate over both in the same
    order.
    """
    for parameter, part in zip(
        bucket, flat.split([local_part(p).numel() for p in bucket]), strict=True
    ):
        strides = torch.empty_like(local_part(parameter), device="meta").stride()
        yield part.as_strided(local_part(parameter).shape, strides, part.storage_offset())
