"""A loop with Accelerate, as its pages "Add Accelerate to your code", "Performing gradient accumulation with
Accelerate" (the part on samples of variable size) and "Checkpointing" have it.

Settings: `uneven_batches` (`even_batches=False`), `counted` (that, and the recipe for samples of variable size),
`find_unused_parameters`, `sync_batchnorm`, `seedable` (`use_seedable_sampler=True` alone), `seedable_epoch` (that, and
`set_epoch` before every epoch).
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.trainers.jobs import BATCH, RANKS, total_loss
from benchmarks.trainers.record import Request, read_request, save


def counted_loss(accelerator: Accelerator, output: Tensor, target: Tensor) -> Tensor:
    """The recipe: the sum here, times the ranks, by the gathered count."""
    total, count = total_loss(output, target)
    return total * accelerator.num_processes / accelerator.gather(count).sum()


def make_accelerator(setting: str) -> Accelerator:
    find_unused = DistributedDataParallelKwargs(
        find_unused_parameters=setting == "find_unused_parameters"
    )
    loading = DataLoaderConfiguration(
        even_batches=setting not in ("uneven_batches", "counted"),
        use_seedable_sampler=setting in ("seedable", "seedable_epoch"),
    )
    return Accelerator(cpu=True, dataloader_config=loading, kwargs_handlers=[find_unused])


def train(request: Request, accelerator: Accelerator) -> tuple[list[float], nn.Module]:
    job, setting = request.job, request.setting
    set_seed(0)
    model = job.model()
    if setting == "sync_batchnorm":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = job.optimizer(model.parameters())
    loader = DataLoader(job.data, batch_size=BATCH // RANKS, shuffle=job.shuffle)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    epochs_done, batches_done = 0, 0
    if request.is_second:
        accelerator.load_state(str(request.checkpoint))
        epochs_done, batches_done = map(int, (request.folder / "position").read_text().split())
    for epoch in range(epochs_done, job.epochs):
        batches = loader
        if request.is_second and epoch == epochs_done:
            batches = accelerator.skip_first_batches(loader, batches_done)
        if setting == "seedable_epoch":
            batches.set_epoch(epoch)
        for batch, (input, target) in enumerate(batches):
            loss = (
                counted_loss(accelerator, model(input), target)
                if setting == "counted"
                else job.loss(model, input, target)
            )
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if request.ends_after(len(losses)):
                accelerator.save_state(str(request.checkpoint))
                (request.folder / "position").write_text(f"{epoch} {batch + 1}")
                return losses, model
    return losses, model


def main() -> None:
    request = read_request()
    accelerator = make_accelerator(request.setting)
    torch.set_num_threads(1)
    losses, model = train(request, accelerator)
    means = accelerator.reduce(torch.tensor(losses), reduction="mean").tolist()
    save(
        request, means, accelerator.unwrap_model(model).state_dict(), rank=accelerator.process_index
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
