"""Buffers that training changes (BatchNorm's running statistics) kept equal on all replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class ChangingBuffers:
    """Finds the buffers that the first step changes and meets them after every step.

    Floating-point buffers become their mean weighted by samples, whole-number ones their maximum. This keeps
    replicas, evaluation and checkpoints well defined; it doesn't make a BatchNorm over micro-batches the one over
    the whole batch.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._before: dict[str, torch.Tensor] | None = {name: b.detach().clone() for name, b in model.named_buffers()}
        self.names: list[str] = []

    def meet(self, weight: float, group: dist.ProcessGroup) -> None:
        """Collective over the replicas, a group. weight: this rank's fraction of the window's samples."""
        if self._before is not None:
            self._find(self._before, group)
            self._before = None
        if not self.names:
            return
        named = dict(self._model.named_buffers())  # asked again: a model may put new tensors in their places
        buffers = [named[name].detach() for name in self.names]
        _meet([b for b in buffers if b.is_floating_point()], torch.float64, weight, dist.ReduceOp.SUM, group)
        _meet([b for b in buffers if not b.is_floating_point()], torch.int64, 1, dist.ReduceOp.MAX, group)

    def _find(self, before: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
        if not before:
            return
        buffers = dict(self._model.named_buffers())
        changed = torch.tensor([float(not torch.equal(old, buffers[name])) for name, old in before.items()],
                               device=next(iter(before.values())).device)
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=group)
        self.names = [name for name, flag in zip(before, changed.tolist(), strict=True) if flag]


def _meet(buffers: Sequence[torch.Tensor], dtype: torch.dtype, factor: float, op: dist.ReduceOp.RedOpType,
          group: dist.ProcessGroup) -> None:
    """All together: a model has many small ones, and each collective waits for all ranks."""
    if not buffers:
        return
    together = torch.cat([buffer.to(dtype).flatten() for buffer in buffers]) * factor
    dist.all_reduce(together, op, group=group)
    for buffer, mixed in zip(buffers, together.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(mixed.view_as(buffer))
