"""A training loop as PyTorch's own tutorial for DistributedDataParallel has it."""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.workload import RANKS, Meter, load_job


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    job = load_job()
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model.named_parameters())
    loader = DataLoader(
        job.data, batch_size=job.batch // RANKS, sampler=DistributedSampler(job.data)
    )
    meter = Meter(steps)
    for input, target in loader:
        loss = job.loss(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if meter.step_done(loss):
            break
    meter.report(dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    main(parser.parse_args().steps)
