"""One contender's steps on two pretended GPUs; prints the host's seconds of each step on rank 0 as JSON: of the whole
process, and without the threads of gloo, which stands for NCCL.

    python -m pretended_cuda.pretend LIBRARY -m benchmarks.host.contender NAME STEPS
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import paceline
from benchmarks.host.model import BATCH, Tokens, data, loss
from paceline.training.stepper import Stepper

RANKS = 2
_OF_THREAD = (
    0b110  # what Linux's clock of a thread's CPU time has in its lowest bits (man 2 clock_getres)
)
_is_gloo: dict[int, bool] = {}  # threads of this process, by number


def clocks_s() -> tuple[float, float]:
    """CPU seconds that this process has taken so far, and the same without the threads of gloo. Those wait for other
    ranks' messages in a loop that does not sleep, which is nothing that NCCL asks of a host."""
    total = time.process_time()
    for thread in Path("/proc/self/task").iterdir():
        if int(thread.name) not in _is_gloo:
            _is_gloo[int(thread.name)] = "gloo" in (thread / "comm").read_text()
    return total, total - sum(
        time.clock_gettime(~number << 3 | _OF_THREAD)
        for number, is_gloo in _is_gloo.items()
        if is_gloo
    )


def replicated(model: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[device.index])


def sharded(model: nn.Module, device: torch.device) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def split(model: nn.Module, device: torch.device) -> nn.Module:
    mesh = init_device_mesh("cuda", (RANKS,))
    styles = {
        **dict.fromkeys("qkv", ColwiseParallel()),
        "mix": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, styles)
    return model


def alone(model: nn.Module, device: torch.device) -> nn.Module:
    return model


# By hand: the wrapper, its ranks, and how many of them share a batch.
BY_HAND: dict[str, tuple[Callable[[nn.Module, torch.device], nn.Module], int, int]] = {
    "plain loop": (alone, 1, 1),
    "DistributedDataParallel": (replicated, RANKS, RANKS),
    "FSDP2": (sharded, RANKS, RANKS),
    "torch tensor parallel": (split, RANKS, 1),
}


def by_hand(rank: int, name: str, steps: int, store: str, result: str) -> None:
    """A loop as torch's tutorials have it, which reads each loss."""
    wrap, ranks, parts = BY_HAND[name]
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            "nccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks
        )
    torch.manual_seed(0)
    model = wrap(Tokens().to(device), device)
    # torch's foreach optimizers refuse split and whole parameters in one group.
    kinds = {True: [], False: []}
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds.values() if kind], lr=1e-3)
    size, part = BATCH // parts, rank % parts
    ends_s = []
    for input, target in DataLoader(data(steps), batch_size=BATCH, pin_memory=False):
        mine = slice(part * size, (part + 1) * size)
        value = loss(
            model(input[mine].to(device, non_blocking=True)),
            target[mine].to(device, non_blocking=True),
        )
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        value.item()
        ends_s.append(clocks_s())
    if rank == 0:
        Path(result).write_text(json.dumps(ends_s))
    if ranks > 1:
        dist.destroy_process_group()


def with_paceline(plan: str, steps: int, folder: Path) -> list[tuple[float, float]]:
    """A run of Paceline's, whose rank 0 notes when each step has ended."""
    step, result = Stepper.step, folder / "ends"
    ends_s: list[tuple[float, float]] = []

    def noted(stepper: Stepper, *arguments: Any, **options: Any) -> Any:
        step_result = step(stepper, *arguments, **options)
        ends_s.append(clocks_s())
        if len(ends_s) == steps and not (dist.is_initialized() and dist.get_rank()):
            result.write_text(json.dumps(ends_s))
        return step_result

    Stepper.step = noted  # type: ignore[method-assign]
    job = paceline.Job(
        model=Tokens,
        data=data(steps),
        loss=loss,
        batch=BATCH,
        steps=steps,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    )
    ranks = paceline.Plan.parse(plan).world_size
    paceline.train(
        job,
        plan,
        devices=f"cuda:0-{ranks - 1}" if ranks > 1 else "cuda:0",
        run=folder / "run",
        check=False,
    )
    return list(json.loads(result.read_text()))


def main(name: str, steps: int) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as made:
        folder = Path(made)
        if name in BY_HAND:
            fork = multiprocessing.get_context("fork")
            arguments = name, steps, str(folder / "store"), str(folder / "ends")
            ranks = [
                fork.Process(target=by_hand, args=(rank, *arguments))
                for rank in range(BY_HAND[name][1])
            ]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
            if any(rank.exitcode for rank in ranks):
                raise SystemExit(f"{name}: ranks ended with {[rank.exitcode for rank in ranks]}")
            ends_s = json.loads((folder / "ends").read_text())
        else:
            ends_s = with_paceline(name, steps, folder)
    print(
        json.dumps(
            [
                [end - begin for begin, end in zip(before, after, strict=True)]
                for before, after in pairwise(ends_s)
            ]
        ),
        flush=True,
    )
    os._exit(0)  # threads of the pretended device have nothing left to do


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
