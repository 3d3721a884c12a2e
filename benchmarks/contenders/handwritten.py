"""A training loop as PyTorch's own tutorial for DistributedDataParallel has it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paceline as pl
from benchmarks.workload import RANKS, Meter, arguments, load_job


def loaded(job: pl.Job) -> Iterator[Any]:
    """This rank's batches of all epochs."""
    sampler = DistributedSampler[Any](job.data)
    loader = DataLoader(job.data, batch_size=job.batch // RANKS, sampler=sampler)
    for epoch in range(job.epochs or 1):
        sampler.set_epoch(epoch)
        yield from loader


def main(
    batches: Callable[[pl.Job], Iterator[Any]],
    distributed: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
) -> None:
    options = arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    job = load_job(options.job)
    model = distributed(job.model())
    optimizer = job.optimizer(model.named_parameters())
    meter = Meter(options.steps)
    for input, target in batches(job):
        loss = job.loss(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if meter.step_done(loss):
            break
    meter.report(dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(loaded)
