"""All-gather and reduce-scatter among CPU ranks, by the fastest collectives of gloo.

gloo's own all-gather copies the data that it sends and receives, and its reduce-scatter sums a copy
of the whole tensor (`allgather_into_tensor_coalesced` and `reduce_scatter_tensor_coalesced` in
torch's ProcessGroupGloo.cpp, torch 2.13). On two ranks over loopback, gathering 32 MiB took 56 ms
by an all-gather and 16 ms by broadcasts. Summing and scattering them took 72 ms by a reduce-scatter
and 34 ms by an all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from paceline.base.waiting import waiting


def gather_in_place(whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather the parts of all ranks into `whole` by broadcasts. Collective.

    Args:
        whole: A contiguous tensor with the parts of all ranks one after the other along its first
            dim. It already contains this rank's own part.
    """
    if not whole.numel():
        return
    works = []
    for rank, part in enumerate(whole.view(group.size(), -1)):
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = rank, True
        works.append(
            group.broadcast([torch.view_as_real(part) if part.is_complex() else part], options)
        )
    with waiting:
        for work in works:
            work.wait()


def reduce_scatter(
    part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM
) -> None:
    """Write this rank's part of the sum of all ranks' tensors to `part`. Collective.

    Args:
        whole: A contiguous tensor as in `gather_in_place`. Afterwards it holds the sums of all
            parts.
        op: torch's `ReduceOp`.
    """
    if not whole.numel():
        return
    options = dist.AllreduceOptions()
    options.reduceOp = op
    work = group.allreduce([torch.view_as_real(whole) if whole.is_complex() else whole], options)
    with waiting:
        work.wait()
    part.copy_(whole.view(group.size(), -1)[group.rank()].view_as(part))
