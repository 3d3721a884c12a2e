"""The loop of `handwritten` with FSDP2, as torch's own tutorial has it: a unit is a block with parameters."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from benchmarks.contenders.handwritten import loaded
from benchmarks.workload import Meter, arguments, load_job
from paceline.model.units import find_units


def main() -> None:
    options = arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    job = load_job(options.job)
    model = job.model()
    for unit in find_units(model).values():
        fully_shard(unit)
    fully_shard(model)
    optimizer = job.optimizer(model.named_parameters())
    meter = Meter(options.steps)
    for input, target in loaded(job):
        loss = job.loss(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if meter.step_done(loss):
            break
    meter.report(dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
