"""A LightningModule and a Trainer, as Lightning's pages "Train a model (basic)", "Manual Optimization",
"GPU training (Intermediate)" and "Saving and loading checkpoints (basic)" have it.

Settings: `weighed` (`use_distributed_sampler=False`, a sampler of one's own, and each rank's sum by the count of all
ranks), `find_unused_parameters` (`strategy="ddp_find_unused_parameters_true"`), `sync_batchnorm`, `stateful` (a loader
with `state_dict` and `load_state_dict`, which Lightning's warning asks for).
"""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from benchmarks.trainers.jobs import BATCH, RANKS, STOP_AFTER, total_loss
from benchmarks.trainers.record import Request, read_request, save


class Module(lightning.LightningModule):
    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request, self.job, self.model = request, request.job, request.job.model()
        self.automatic_optimization = request.name != "custom"
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        input, target = batch
        if self.request.setting == "weighed":
            total, count = total_loss(self.model(input), target)
            return total * self.trainer.world_size / self.all_gather(count).sum()
        loss = self.job.loss(self.model, input, target)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        if self.request.ends_after(len(self.losses)):
            save(self.request, self.mean_losses(), {}, rank=self.global_rank)
            self.trainer.strategy.barrier()
            os._exit(0)  # as a run that is killed: its checkpoint is there

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: object, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def mean_losses(self) -> list[float]:
        """Of every step, averaged over the ranks."""
        return self.trainer.strategy.reduce(torch.tensor(self.losses), reduce_op="mean").tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.job.optimizer(self.model.parameters())


class EveryOther(Sampler[int]):
    """Every RANKS-th sample in sequence, none of them twice."""

    def __init__(self, num_samples: int) -> None:
        self.indices = range(int(os.environ["RANK"]), num_samples, RANKS)

    def __iter__(self) -> Any:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class StatefulLoader(DataLoader[Any]):
    """A loader that knows how many batches of an epoch it has given."""

    done = first = 0

    def __iter__(self) -> Any:
        first, self.first = self.first, 0
        for self.done, batch in enumerate(islice(super().__iter__(), first, None), start=first + 1):
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["done"]


def main() -> None:
    request = read_request()
    job, setting = request.job, request.setting
    lightning.seed_everything(0)
    keeper = ModelCheckpoint(
        dirpath=request.checkpoint, filename="last", every_n_train_steps=STOP_AFTER
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp_find_unused_parameters_true"
        if setting == "find_unused_parameters"
        else "ddp",
        max_epochs=job.epochs,
        use_distributed_sampler=setting != "weighed",
        sync_batchnorm=setting == "sync_batchnorm",
        callbacks=[keeper] if request.part == "first" else [],
        enable_checkpointing=request.part == "first",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(request)
    sampler = EveryOther(len(job.data)) if setting == "weighed" else None
    kind = StatefulLoader if setting == "stateful" else DataLoader
    loader = kind(job.data, batch_size=BATCH // RANKS, shuffle=job.shuffle, sampler=sampler)
    trainer.fit(
        module, loader, ckpt_path=request.checkpoint / "last.ckpt" if request.is_second else None
    )
    save(request, module.mean_losses(), module.model.state_dict(), rank=trainer.global_rank)


if __name__ == "__main__":
    main()
