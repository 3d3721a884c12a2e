"""Collectives of ranks on one host. The group belongs to its owner: torch's default process group is left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.waiting import waiting
from paceline.torch_private.process_groups import gloo_on_loopback, nccl

PATIENCE_S = 1800.0  # for a rank that computes; one that dies is noticed at once
# Who watches the ranks speaks first, and names the one that hangs. This is the last resort.
TIMEOUT = timedelta(seconds=2 * PATIENCE_S)


Meet = Callable[[int], "RankGroup"]  # makes a rank's side of a group


class RankGroup:
    """Ranks that sum and gather tensors: over gloo, on this host's loopback interface, and over NCCL those of GPUs.

    Args:
        rendezvous: A file that does not exist yet, the same for all ranks.
        uses_nccl: Whether NCCL sends tensors of GPUs. Without it they go by way of the CPU.
    """

    def __init__(self, rank: int, size: int, rendezvous: Path, *, uses_nccl: bool) -> None:
        self.rank, self.size = rank, size
        store = dist.FileStore(str(rendezvous), size)
        self._gloo = gloo_on_loopback(dist.PrefixStore("gloo", store), rank, size, TIMEOUT)
        self._nccl: Any = None
        if uses_nccl:
            self._nccl = nccl(dist.PrefixStore("nccl", store), rank, size, TIMEOUT)

    def close(self) -> None:
        """Leave. Later forks of this process would not survive the group's end in garbage collection."""
        if self._nccl is not None:
            self._nccl.abort()
        self._gloo = self._nccl = None

    def abort(self) -> None:
        """End what waits for a rank that is no more: NCCL does not notice."""
        if self._nccl is not None:
            self._nccl.abort()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of the ranks' tensors, the same bits on every rank."""
        group, result = self._group_of(tensor.detach().clone(memory_format=torch.contiguous_format))
        with waiting:
            group.allreduce([result]).wait()
        return result.to(tensor.device)

    def gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The ranks' tensors one after the other along dim 0. lengths: of each rank's dim 0."""
        rest, longest = tensor.shape[1:], max(lengths)
        padded = tensor.new_zeros((longest, *rest))
        padded[: lengths[self.rank]] = tensor
        if not padded.numel():
            return tensor.new_zeros((sum(lengths), *rest))
        group, sent = self._group_of(padded.reshape(-1).view(torch.uint8))  # any dtype
        received = [torch.empty_like(sent) for _ in lengths]
        with waiting:
            group.allgather([received], [sent]).wait()
        return torch.cat(
            [
                part.view(tensor.dtype).reshape(longest, *rest)[:length]
                for part, length in zip(received, lengths, strict=True)
            ]
        ).to(tensor.device)

    def _group_of(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Who sends the tensor, and the tensor where that one takes it from."""
        if not tensor.is_cuda:
            return self._gloo, tensor
        return (self._gloo, tensor.cpu()) if self._nccl is None else (self._nccl, tensor)
