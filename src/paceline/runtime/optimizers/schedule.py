"""The learning-rate schedule of a job."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import JobError
from paceline.job import Job


def build_schedule(job: Job, optimizer: torch.optim.Optimizer) -> Any:
    """The job's learning-rate schedule; None if it has none."""
    if job.lr_schedule is None:
        return None
    schedule = job.lr_schedule(optimizer)
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise JobError("ReduceLROnPlateau waits for a metric, and a schedule is stepped by optimizer steps alone",
                       hint="use a schedule of steps, such as CosineAnnealingLR or LambdaLR")
    if not hasattr(schedule, "step"):
        raise JobError(f"lr_schedule returned {type(schedule).__name__} and not a learning-rate scheduler")
    return schedule
