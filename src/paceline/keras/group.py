"""Collectives of ranks on one host. The group belongs to its owner: torch's default process group is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=30)  # for a rank that computes; one that dies is noticed at once


class RankGroup:
    """Ranks that sum and gather tensors over gloo, on this host's loopback interface.

    Args:
        rendezvous: A file that does not exist yet, the same for all ranks.
    """

    def __init__(self, rank: int, size: int, rendezvous: Path) -> None:
        self.rank, self.size = rank, size
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        self._gloo: Any = kind(dist.FileStore(str(rendezvous), size), rank, size, options)

    def close(self) -> None:
        """Leave. Later forks of this process would not survive the group's end in garbage collection."""
        self._gloo = None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of the ranks' tensors, the same bits on every rank."""
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._gloo.allreduce([result]).wait()
        return result

    def gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The ranks' tensors one after the other along dim 0. lengths: of each rank's dim 0."""
        rest, longest = tensor.shape[1:], max(lengths)
        padded = tensor.new_zeros((longest, *rest))
        padded[:lengths[self.rank]] = tensor
        if not padded.numel():
            return tensor.new_zeros((sum(lengths), *rest))
        sent = padded.reshape(-1).view(torch.uint8)  # any dtype
        received = [torch.empty_like(sent) for _ in lengths]
        self._gloo.allgather([received], [sent]).wait()
        return torch.cat([part.view(tensor.dtype).reshape(longest, *rest)[:length]
                          for part, length in zip(received, lengths, strict=True)])
