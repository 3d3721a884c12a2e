"""The experiment: what a job is, and what users give of it: data, loss, models, optimizers, steps, phases."""

from paceline.job.job import AUTOCAST, Job, Precision

__all__ = ["AUTOCAST", "Job", "Precision"]
