"""DeepSpeed's engine without ZeRO, as its pages "Getting Started" and "CIFAR-10 Tutorial" have it: the data set goes to
`initialize`, which shuffles it with a fixed seed. DeepSpeed takes the CPU where it sees no other device, with gloo.

Settings: `drop_last` (`"dataloader_drop_last": true`), `weighed` (by hand: a loader of one's own without padding, and
each rank's sum by the count of all ranks), `zero_1` (ZeRO stage 1), `module` (by hand: the step calls
`engine.module`), `sync_batchnorm`.
"""

from __future__ import annotations

from itertools import islice

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.trainers.jobs import BATCH, RANKS
from benchmarks.trainers.record import Request, read_request, save
from benchmarks.trainers.with_ddp import EveryOther, mean_over_ranks, weighed_loss


def train(request: Request, model: nn.Module) -> list[float]:
    job, setting = request.job, request.setting
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // RANKS,
        "dataloader_drop_last": setting == "drop_last",
        "zero_optimization": {"stage": 1 if setting == "zero_1" else 0},
        "zero_allow_untested_optimizer": True,
    }
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=job.optimizer(list(model.parameters())),
        training_data=job.data,
        config=config,
    )
    if setting == "weighed":
        loader = DataLoader(job.data, batch_size=BATCH // RANKS, sampler=EveryOther(len(job.data)))
    losses: list[float] = []
    first_epoch, done = 0, 0
    if request.is_second:
        _, client = engine.load_checkpoint(str(request.checkpoint))
        first_epoch, done = client["epoch"], client["batches"]
    for epoch in range(first_epoch, job.epochs):
        for batch, (input, target) in enumerate(islice(loader, done, None), start=done):
            called = engine.module if setting == "module" else engine
            loss = (
                weighed_loss(engine(input), target)
                if setting == "weighed"
                else job.loss(called, input, target)
            )
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if request.ends_after(len(losses)):
                engine.save_checkpoint(
                    str(request.checkpoint), client_state={"epoch": epoch, "batches": batch + 1}
                )
                return losses
        done = 0
    return losses


def main() -> None:
    request = read_request()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.set_num_threads(1)
    model = request.job.model()
    if request.setting == "sync_batchnorm":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    losses = train(request, model)
    save(request, mean_over_ranks(losses), model.state_dict(), rank=dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
