"""Builds and steps the learning-rate schedule of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from paceline.base.errors import JobError, nearest
from paceline.job import Job
from paceline.job.named_optimizers import NamedSchedules
from paceline.job.own_step import spec
from paceline.job.phases import VALIDATION_LOSS, Monitored


def build_schedule(job: Job, optimizer: torch.optim.Optimizer) -> Any:
    """Return the job's learning-rate schedule; None if it has none."""
    if job.lr_schedule is None:
        return None
    schedule = job.lr_schedule(optimizer)
    if not hasattr(schedule, "step") and not isinstance(schedule, NamedSchedules):
        raise JobError(
            f"lr_schedule returned {type(schedule).__name__} and not a learning-rate scheduler"
        )
    return schedule


def waits_for_metric(schedule: Any) -> bool:
    """Whether a schedule is stepped by evaluations."""
    return isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)


def waits_for_evaluations(schedule: Any, job: Job) -> bool:
    """Whether any of the job's schedules is stepped by evaluations."""
    return bool(_waiting(schedule, job))


def step_schedule(schedule: Any) -> None:
    """Step the schedule after an optimizer step."""
    if schedule is not None and not waits_for_metric(schedule):
        schedule.step()


def step_by_metrics(schedule: Any, job: Job, figures: Mapping[str, float]) -> None:
    """Step the schedules that wait for a figure of an evaluation, after the evaluation that ended
    an epoch.

    Raises:
        JobError: the evaluation did not give the figure.
    """
    for waiting, metric in _waiting(schedule, job):
        if metric not in figures:
            raise _no_such_metric(metric, figures)
        waiting.step(figures[metric])


def check_monitored(schedule: Any, job: Job, measured: Iterable[str] | None = None) -> None:
    """Check that evaluations give the figures for which schedules wait.

    Args:
        measured: Names of the figures that an evaluation gives in addition to the loss; the job's
            metrics if it is left out.

    Raises:
        JobError: a schedule waits for a figure that no evaluation gives, or would be given one that
            it ignores.
    """
    _refuse_waiting(job, _each(schedule, job))
    for metric in {metric for _, metric in _waiting(schedule, job)} - {VALIDATION_LOSS}:
        known = [VALIDATION_LOSS, *(job.metrics if measured is None else measured)]
        if metric not in known:
            raise _no_such_metric(metric, known)


def _refuse_waiting(job: Job, schedules: Iterable[tuple[Any, Any]]) -> None:
    """Refuse schedules that wait for an evaluation if the job has none, and monitored ones that
    take no figure.

    Args:
        schedules: Each with the function that built it.

    Raises:
        JobError: one waits for an evaluation, and the job has none, or would be given a metric that
            it ignores.
    """
    for schedule, build in schedules:
        if isinstance(build, Monitored) and not waits_for_metric(schedule):
            raise JobError(
                f"lr_schedule monitors '{build.metric}', and a {type(schedule).__name__} takes no metric",
                hint="pl.monitored is for ReduceLROnPlateau; give the function itself",
            )
        if waits_for_metric(schedule) and (job.validation is None or job.num_samples is None):
            raise JobError(
                "ReduceLROnPlateau waits for a figure of each epoch's evaluation, and "
                + (
                    "there is no validation data"
                    if job.validation is None
                    else "a stream has no known epochs"
                ),
                hint="validation=..., or a schedule of steps, such as CosineAnnealingLR",
            )
        if (
            isinstance(build, Monitored)
            and job.own_validate is None
            and build.metric not in (known := [VALIDATION_LOSS, *job.metrics])
        ):
            raise _no_such_metric(build.metric, known)


def _each(schedule: Any, job: Job) -> list[tuple[Any, Any]]:
    """Return a job's schedules, each with the function that builds it."""
    if isinstance(schedule, NamedSchedules):
        return [
            (built, spec(job.optimizers[name]).lr_schedule)
            for name, built in schedule.schedules.items()
        ]
    return [(schedule, job.lr_schedule)]


def _waiting(schedule: Any, job: Job) -> list[tuple[Any, str]]:
    """Return schedules that are stepped by evaluations, each with the name of its figure."""
    return [
        (waiting, build.metric if isinstance(build, Monitored) else VALIDATION_LOSS)
        for waiting, build in _each(schedule, job)
        if waits_for_metric(waiting)
    ]


def _no_such_metric(metric: str, known: Iterable[str]) -> JobError:
    return JobError(f"lr_schedule monitors '{metric}': {nearest(metric, list(known))}")
