"""The figure by which a run is judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.base.errors import JobError, nearest
from paceline.job.own_step import is_of_script

if TYPE_CHECKING:
    from paceline.job import Job

LOSSES = ("loss", "validation_loss")


@dataclass(frozen=True)
class Monitor:
    """The figure by which a run is judged, and whether less or more of it is better.

    Raises:
        JobError: another mode.
    """

    name: str  # "validation_loss", a metric, or "loss", the mean training loss of an epoch
    # Which values are better; None means "min" for losses and "max" for metrics.
    given_mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        if self.given_mode not in (None, "min", "max"):
            raise JobError(f"mode must be 'min' or 'max', got {self.given_mode!r}")

    @property
    def mode(self) -> Literal["min", "max"]:
        return self.given_mode or ("min" if self.name in LOSSES else "max")

    @property
    def is_of_epochs(self) -> bool:
        return self.name == "loss"

    def problem(self, job: Job, callback_name: str) -> str | None:
        """Return why a job has no such figure; None if it has one."""
        known: Iterable[str] = ("loss",)
        if job.validation is not None:
            known = ("validation_loss", *job.metrics, "loss")
        if (
            self.name in known
            or (job.compute is not None and job.validation is not None)
            or is_of_script(job)
        ):
            return None  # what `compute` or run.evaluate measures is known when it runs
        if job.validation is None and self.name == "validation_loss":
            return f"{callback_name} looks at validation_loss, and the job has no validation data: give validation="
        return f"{callback_name} looks at {self.name!r}, which this job does not compute: {nearest(self.name, known)}"

    def value(self, figures: Mapping[str, float]) -> float:
        """Return the figure of an evaluation.

        Raises:
            JobError: the job's `compute` does not return it.
        """
        if self.name not in figures:
            raise JobError(
                f"a callback looks at {self.name!r}, which the job does not compute: "
                f"{nearest(self.name, figures)}"
            )
        return figures[self.name]

    def is_better(self, value: float, than: float | None, *, by: float = 0.0) -> bool:
        """Whether a value is better than another by more than `by`. NaN never is.

        >>> Monitor("accuracy").is_better(0.5, 0.4), Monitor("validation_loss").is_better(0.5, 0.4)
        (True, False)
        """
        if math.isnan(value):
            return False
        if than is None:
            return True
        return value < than - by if self.mode == "min" else value > than + by
