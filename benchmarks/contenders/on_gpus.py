"""The loop that a user writes by hand for GPUs, alone or with DistributedDataParallel under torchrun, in any precision.

python -m benchmarks.contenders.on_gpus --set width=1024 --steps 30 [--compile]
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paceline
from benchmarks.gpu import jobs
from benchmarks.workload import WARM_UP_STEPS
from paceline.job import AUTOCAST


def main(settings: dict[str, str], steps: int, compiled: bool) -> None:
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    job = paceline.load(f"{jobs.__file__}:gpt", settings)
    model = job.model().to(device)
    if job.precision == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if job.precision == "fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
        is_emulated = torch.cuda.get_device_capability(device) < (
            8,
            9,
        )  # the first one with float8 products
        convert_to_float8_training(model, config=replace(config, emulate=is_emulated))
    optimizer = job.optimizer(model.named_parameters())
    if compiled:
        model = torch.compile(model)
    sampler = None
    if ranks > 1:
        dist.init_process_group("nccl", device_id=device)
        model, sampler = (
            DistributedDataParallel(model, device_ids=[device.index]),
            DistributedSampler(job.data),
        )
    loader = DataLoader(
        job.data,
        batch_size=job.batch // ranks,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=1,
        pin_memory=True,
    )
    name = AUTOCAST.get(job.precision)
    half = torch.autocast("cuda", getattr(torch, name)) if name else nullcontext()
    scaler = torch.amp.GradScaler("cuda", enabled=job.precision == "fp16")
    started_s = 0.0
    for step, (input, target) in enumerate(loader, start=1):
        with half:
            loss = job.loss(
                model(input.to(device, non_blocking=True)), target.to(device, non_blocking=True)
            )
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        loss.item()  # every contender reads each loss
        if step == WARM_UP_STEPS:
            started_s = time.perf_counter()
        if step == WARM_UP_STEPS + steps:
            break
    took_s = time.perf_counter() - started_s
    if rank == 0:
        print(
            json.dumps(
                {
                    "steps_per_s": steps / took_s,
                    "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
                }
            ),
            flush=True,
        )
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    main(dict(text.split("=", 1) for text in given.set), given.steps, given.compile)
