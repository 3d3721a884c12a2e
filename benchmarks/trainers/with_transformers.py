"""Transformers' Trainer, as its pages "Trainer" and "Subclassing Trainer methods" have it: a module that returns its
loss, or a `compute_loss` of one's own. Samples are taken in sequence, without a decay of the learning rate or clipping.

Settings: `uneven_batches` (`accelerator_config={"even_batches": False}`), `counted` (that, and a `compute_loss_func`
that divides by `num_items_in_batch`), `accepting` (a module that takes `num_items_in_batch`), `sync_batchnorm`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.trainers.jobs import BATCH, RANKS, STOP_AFTER, mean_loss, total_loss
from benchmarks.trainers.record import Request, read_request, save


class Named(Dataset[dict[str, Tensor]]):
    """Samples as mappings: Trainer passes them by name."""

    def __init__(self, data: Dataset[tuple[Tensor, Tensor]]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        input, target = self.data[index]
        return {"input": input, "labels": target}


class WithLoss(nn.Module):
    """A model as Trainer expects it: given labels it returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.model(input)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": mean_loss(logits, labels), "logits": logits}
        )


class WithCountedLoss(WithLoss):
    """A model as Transformers' own: its loss is the sum by the number that Trainer has counted on all ranks."""

    def forward(self, input: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.model(input)
        return {
            "loss": total_loss(logits, labels)[0] / kwargs["num_items_in_batch"],
            "logits": logits,
        }


class OwnStep(Trainer):
    """A training step of one's own: `compute_loss` calls the model as often as it likes."""

    job: Any

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor:
        return self.job.loss(
            lambda input: model(input)["logits"], inputs["input"], inputs["labels"]
        )


def counted_loss(
    outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Tensor | None = None
) -> Tensor:
    return total_loss(outputs["logits"], labels)[0] / num_items_in_batch


class Killed(TrainerCallback):
    """Ends the process when a checkpoint has been written, as a run that is killed."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        save(self.request, losses_of(state.log_history), {}, rank=args.process_index)
        torch.distributed.barrier()
        os._exit(0)


def losses_of(history: list[dict[str, float]]) -> list[float]:
    return [line["loss"] for line in history if "loss" in line]


def main() -> None:
    request = read_request()
    job, setting = request.job, request.setting
    arguments = TrainingArguments(
        output_dir=str(request.checkpoint),
        per_device_train_batch_size=BATCH // RANKS,
        num_train_epochs=job.epochs,
        train_sampling_strategy="random" if job.shuffle else "sequential",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="steps" if request.part == "first" else "no",
        save_steps=STOP_AFTER,
        accelerator_config={"even_batches": setting not in ("uneven_batches", "counted")},
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    model: nn.Module = (WithCountedLoss if setting == "accepting" else WithLoss)(job.model())
    if setting == "sync_batchnorm":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    trainer = (OwnStep if request.name == "custom" else Trainer)(
        model,
        arguments,
        train_dataset=Named(job.data),
        optimizers=(job.optimizer(model.parameters()), None),
        compute_loss_func=counted_loss if setting == "counted" else None,
        callbacks=[Killed(request)] if request.part == "first" else None,
    )
    trainer.job = job
    torch.set_num_threads(1)
    trainer.train(resume_from_checkpoint=request.is_second or None)
    losses = losses_of(trainer.state.log_history)[
        STOP_AFTER if request.is_second else 0 :
    ]  # it has the first part's
    weights = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    save(request, losses, weights, rank=arguments.process_index)


if __name__ == "__main__":
    main()
