"""The loop with Hugging Face Accelerate."""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.workload import RANKS, Meter, load_job


def main(steps: int) -> None:
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    job = load_job()
    model = job.model()
    optimizer = job.optimizer(model.named_parameters())
    loader = DataLoader(job.data, batch_size=job.batch // RANKS, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    meter = Meter(steps)
    for input, target in loader:
        loss = job.loss(model(input), target)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if meter.step_done(loss):
            break
    meter.report(accelerator.process_index)
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    main(parser.parse_args().steps)
