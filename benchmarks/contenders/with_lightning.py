"""The job as a LightningModule, with loggers, checkpoints and the progress bar off."""

import argparse

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import paceline as pl
from benchmarks.workload import RANKS, Meter, load_job


class Module(lightning.LightningModule):
    def __init__(self, job: pl.Job, meter: Meter) -> None:
        super().__init__()
        self.job, self.meter, self.model = job, meter, job.model()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        input, target = batch
        return self.job.loss(self.model(input), target)

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: object, batch_idx: int) -> None:
        self.meter.step_done(outputs["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.job.optimizer(self.model.named_parameters())


def main(steps: int) -> None:
    torch.set_num_threads(1)
    job = load_job()
    meter = Meter(steps)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_steps=meter.total_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Module(job, meter), DataLoader(job.data, batch_size=job.batch // RANKS, shuffle=True)
    )
    meter.report(trainer.global_rank)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    main(parser.parse_args().steps)
