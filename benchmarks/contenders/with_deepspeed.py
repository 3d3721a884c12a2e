"""The loop with DeepSpeed's engine on CPU, without ZeRO: its plain data parallelism."""

import argparse

import deepspeed
import torch

from benchmarks.workload import RANKS, Meter, load_job


def main(steps: int) -> None:
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.set_num_threads(1)
    job = load_job()
    model = job.model()
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=job.optimizer(list(model.named_parameters())),
        training_data=job.data,
        config={
            "train_batch_size": job.batch,
            "train_micro_batch_size_per_gpu": job.batch // RANKS,
        },
    )
    meter = Meter(steps)
    for input, target in loader:
        loss = job.loss(engine(input), target)
        engine.backward(loss)
        engine.step()
        if meter.step_done(loss):
            break
    meter.report(engine.global_rank)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    main(parser.parse_args().steps)
