"""Buffers that training changes (BatchNorm's running statistics) kept equal on all replicas."""

from __future__ import annotations

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
        buffers = dict(self._model.named_buffers())  # asked again: a model may put new tensors in their places
        for name in self.names:
            buffer = buffers[name].detach()
            if buffer.is_floating_point():
                mixed = buffer.double() * weight
                dist.all_reduce(mixed, group=group)
                buffer.copy_(mixed)
            else:
                dist.all_reduce(buffer, dist.ReduceOp.MAX, group=group)

    def _find(self, before: dict[str, torch.Tensor], group: dist.ProcessGroup) -> None:
        if not before:
            return
        buffers = dict(self._model.named_buffers())
        changed = torch.tensor([float(not torch.equal(old, buffers[name])) for name, old in before.items()],
                               device=next(iter(before.values())).device)
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=group)
        self.names = [name for name, flag in zip(before, changed.tolist(), strict=True) if flag]
