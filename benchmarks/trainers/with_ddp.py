"""A loop with DistributedDataParallel, as PyTorch's tutorials "Getting Started with Distributed Data Parallel" and
"Saving and Loading a General Checkpoint" have it.

Settings: `drop_last` (of DistributedSampler), `weighed` (by hand: no padding, and each rank's sum by the count of all
ranks), `find_unused_parameters`, `sync_batchnorm`, `skip` (by hand: the batches of the epoch that are done).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from benchmarks.trainers.jobs import BATCH, RANKS, total_loss
from benchmarks.trainers.record import Request, read_request, save


class EveryOther(Sampler[int]):
    """Every RANKS-th sample in sequence, none of them twice."""

    def __init__(self, num_samples: int) -> None:
        self.indices = range(dist.get_rank(), num_samples, dist.get_world_size())

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def set_epoch(self, epoch: int) -> None:
        """The order is the same in all epochs."""


def mean_over_ranks(losses: list[float]) -> list[float]:
    """Of every step's loss, at the end of a run."""
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


def weighed_loss(output: Tensor, target: Tensor) -> Tensor:
    """DistributedDataParallel divides by the ranks; what is left is the sum of all by the count of all."""
    total, count = total_loss(output, target)
    dist.all_reduce(count)
    return total * dist.get_world_size() / count


def train(request: Request, model: nn.Module) -> tuple[list[float], nn.Module]:
    """The tutorials' loop over any module. Returns this rank's losses and the trained module."""
    job, setting = request.job, request.setting
    sampler = (
        EveryOther(len(job.data))
        if setting == "weighed"
        else DistributedSampler(job.data, shuffle=job.shuffle, drop_last=setting == "drop_last")
    )
    loader = DataLoader(job.data, batch_size=BATCH // RANKS, sampler=sampler)
    if setting == "sync_batchnorm":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    replica = DistributedDataParallel(
        model, find_unused_parameters=setting == "find_unused_parameters"
    )
    optimizer = job.optimizer(p for p in replica.parameters() if p.requires_grad)
    losses, first_epoch, done = [], 0, 0
    if request.is_second:
        saved = torch.load(request.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"]
        done = saved["batches"] if setting == "skip" else 0
    for epoch in range(first_epoch, job.epochs):
        sampler.set_epoch(epoch)
        for batch, (input, target) in enumerate(islice(loader, done, None), start=done):
            optimizer.zero_grad()
            loss = (
                weighed_loss(replica(input), target)
                if setting == "weighed"
                else job.loss(replica, input, target)
            )
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if request.ends_after(len(losses)):
                if dist.get_rank() == 0:
                    torch.save(
                        {
                            "model": model.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "epoch": epoch,
                            "batches": batch + 1,
                        },
                        request.checkpoint,
                    )
                return losses, model
        done = 0
    return losses, model


def main() -> None:
    request = read_request()
    dist.init_process_group("gloo")
    losses, model = train(request, request.job.model())
    save(request, mean_over_ranks(losses), model.state_dict(), rank=dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
