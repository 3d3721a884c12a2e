"""The learning-rate schedule of a job."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import JobError, nearest
from paceline.job import Job
from paceline.phases import VALIDATION_LOSS, Monitored


def build_schedule(job: Job, optimizer: torch.optim.Optimizer) -> Any:
    """The job's learning-rate schedule; None if it has none."""
    if job.lr_schedule is None:
        return None
    schedule = job.lr_schedule(optimizer)
    if not hasattr(schedule, "step"):
        raise JobError(f"lr_schedule returned {type(schedule).__name__} and not a learning-rate scheduler")
    return schedule


def monitored_by(job: Job) -> str:
    """The figure that a schedule which waits for one is given."""
    return job.lr_schedule.metric if isinstance(job.lr_schedule, Monitored) else VALIDATION_LOSS


def waits_for_metric(schedule: Any) -> bool:
    """Whether a schedule is stepped by evaluations."""
    return isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)


def step_schedule(schedule: Any) -> None:
    """An optimizer step was taken."""
    if schedule is not None and not waits_for_metric(schedule):
        schedule.step()


def check_monitored(schedule: Any, job: Job) -> None:
    """
    Raises:
        JobError: a schedule waits for a figure that no evaluation gives, or would be given one that it ignores.
    """
    metric = monitored_by(job)
    if not waits_for_metric(schedule):
        if isinstance(job.lr_schedule, Monitored):
            raise JobError(f"lr_schedule monitors '{metric}', and a {type(schedule).__name__} takes no metric",
                           hint="pl.monitored is for ReduceLROnPlateau; give the function itself")
        return
    if job.validation is None or job.num_samples is None:
        raise JobError("ReduceLROnPlateau waits for a figure of each epoch's evaluation, and "
                       + ("there is no validation data" if job.validation is None else "a stream has no known epochs"),
                       hint="validation=..., or a schedule of steps, such as CosineAnnealingLR")
    known = [VALIDATION_LOSS, *job.metrics]
    if metric not in known:
        raise JobError(f"lr_schedule monitors '{metric}': {nearest(metric, known)}")
