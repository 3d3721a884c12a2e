"""A loop that saves a checkpoint every so many steps and, started again, goes on from the last one."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.recovery.blocks import job, net, samples


def main(folder: Path, steps: int, save_every: int, width: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch, data = job().batch, samples(width)
    model = DistributedDataParallel(net(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, path = 0, folder / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    per_epoch = len(data) // batch
    for step in range(first, steps):
        order = torch.randperm(
            len(data), generator=torch.Generator().manual_seed(step // per_epoch)
        )
        window = order[step % per_epoch * batch :][:batch].chunk(world_size)[rank]
        inputs, targets = data[window]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if rank == 0:
            if (step + 1) % save_every == 0:
                torch.save(
                    {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step + 1,
                    },
                    path.with_suffix(".tmp"),
                )
                path.with_suffix(".tmp").replace(path)
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(
                    json.dumps({"step": step + 1, "time": time.time(), "pid": os.getpid()}) + "\n"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    main(arguments.folder, arguments.steps, arguments.save_every, arguments.width)
