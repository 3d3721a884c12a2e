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
        self._all = dict(model.named_buffers())
        self._before: dict[str, torch.Tensor] | None = {name: b.detach().clone() for name, b in self._all.items()}
        self.names: list[str] = []

    def meet(self, weight: float) -> None:
        """Collective over all ranks. weight: this rank's fraction of the window's samples."""
        if not self._all:
            return
        if self._before is not None:
            self._find(self._before)
            self._before = None
        for name in self.names:
            buffer = self._all[name]
            if buffer.is_floating_point():
                mixed = buffer.detach().double() * weight
                dist.all_reduce(mixed)
                buffer.copy_(mixed)
            else:
                dist.all_reduce(buffer, dist.ReduceOp.MAX)

    def _find(self, before: dict[str, torch.Tensor]) -> None:
        changed = torch.tensor([float(not torch.equal(before[name], b)) for name, b in self._all.items()],
                               device=next(iter(self._all.values())).device)
        dist.all_reduce(changed, dist.ReduceOp.MAX)
        self.names = [name for name, flag in zip(self._all, changed.tolist(), strict=True) if flag]
