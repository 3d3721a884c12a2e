"""The experiment that a user describes: a job with its data, loss, models, optimizers, steps and
phases.
"""

from paceline.job.job import AUTOCAST, Job, Precision

__all__ = ["AUTOCAST", "Job", "Precision"]
