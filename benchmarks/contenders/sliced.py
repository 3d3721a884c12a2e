"""The same loop over tensors in memory: it takes rows of a permutation, in place of a loader's samples."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import paceline as pl
from benchmarks.contenders.handwritten import main
from benchmarks.workload import RANKS


def sliced(job: pl.Job) -> Iterator[tuple[Tensor, ...]]:
    """This rank's rows of each batch, in all epochs."""
    for epoch in range(job.epochs or 1):
        order = torch.randperm(len(job.data), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(job.batch):
            rows = batch.chunk(RANKS)[dist.get_rank()]
            yield tuple(tensor[rows] for tensor in job.data.tensors)


if __name__ == "__main__":
    main(sliced)
