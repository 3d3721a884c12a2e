"""A Trainer's learning-rate schedule, made again for the optimizer of a rank."""

from __future__ import annotations

from typing import Any

import torch

from paceline.job.remade import remade_schedule


def follows_evaluations(trainer: Any) -> bool:
    """Whether the schedule is one that Trainer steps by a metric of evaluations, in its own
    process.
    """
    scheduler = trainer.lr_scheduler
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    return isinstance(scheduler, plateau) or (
        scheduler is None and trainer.args.lr_scheduler_type == "reduce_lr_on_plateau"
    )


def schedule_of(trainer: Any, optimizer: torch.optim.Optimizer, *, steps: int) -> Any:
    """Make the Trainer's learning-rate schedule for this optimizer.

    It is made by `create_scheduler`, or is a copy of a schedule that the Trainer was given.
    """
    scheduler = trainer.lr_scheduler
    if scheduler is not None and not trainer._created_lr_scheduler:
        return remade_schedule(scheduler, optimizer)
    trainer.lr_scheduler = None
    try:
        return trainer.create_scheduler(num_training_steps=steps, optimizer=optimizer)
    finally:
        trainer.lr_scheduler, trainer._created_lr_scheduler = scheduler, scheduler is not None
