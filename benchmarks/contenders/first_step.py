"""A bare script that takes one optimizer step with DistributedDataParallel and says when: the start-up to beat."""

import importlib.util
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main(example: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    spec = importlib.util.spec_from_file_location("example", example)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    job = module.job()
    model = DistributedDataParallel(job.model())
    optimizer = job.optimizer(model.named_parameters())
    size = job.batch // dist.get_world_size()
    input, target = next(
        iter(DataLoader(job.data, batch_size=size, sampler=DistributedSampler(job.data)))
    )
    loss = job.loss(model(input), target)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(time.time(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
