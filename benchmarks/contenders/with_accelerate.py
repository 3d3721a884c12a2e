"""The loop with Hugging Face Accelerate."""

from itertools import chain, repeat

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.workload import RANKS, Meter, arguments, load_job


def main() -> None:
    options = arguments()
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    job = load_job(options.job)
    model = job.model()
    optimizer = job.optimizer(model.named_parameters())
    loader = DataLoader(job.data, batch_size=job.batch // RANKS, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    meter = Meter(options.steps)
    for input, target in chain.from_iterable(repeat(loader, job.epochs or 1)):
        loss = job.loss(model(input), target)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if meter.step_done(loss):
            break
    meter.report(accelerator.process_index)
    accelerator.end_training()


if __name__ == "__main__":
    main()
