"""Ends a run that no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from paceline.base.errors import JobError
from paceline.callbacks.monitor import Monitor
from paceline.job.callback import Callback, EpochReport, EvaluationReport

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.job.callback import RunHandle


class EarlyStopping(Callback):
    """Ends the run, as done, if a figure has not improved in `patience` evaluations in a row.

    Args:
        monitor: "validation_loss" or a metric of the job, checked after each evaluation; or "loss",
            the mean training loss of an epoch, checked after each epoch.
        patience: Evaluations without a better figure after which the run ends; at least 1.
        mode: Whether "min" or "max" is better; by default "min" for losses and "max" for metrics.
        min_delta: By how much a figure must be better to count.

    Raises:
        JobError: a value that makes no sense.
    """

    def __init__(
        self,
        monitor: str = "validation_loss",
        patience: int = 3,
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
    ) -> None:
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise JobError(
                f"EarlyStopping's patience must be a whole number of at least 1, got {patience!r}"
            )
        if not (isinstance(min_delta, int | float) and 0 <= min_delta < math.inf):
            raise JobError(f"EarlyStopping's min_delta must be at least 0, got {min_delta!r}")
        self.monitor, self.patience, self.min_delta = (
            Monitor(monitor, mode),
            patience,
            float(min_delta),
        )
        # Checkpoints keep these values, so that a resumed run continues to count.
        self.best: float | None = None  # the best figure so far
        self.best_step: int | None = None  # its step
        self.num_worse = 0  # evaluations since the best one

    def problem(self, job: Job) -> str | None:
        return self.monitor.problem(job, "EarlyStopping")

    def on_start(self, run: RunHandle) -> None:
        if run.step == 0:
            self.best, self.best_step, self.num_worse = None, None, 0
        self._stop_if_due(run)

    def on_evaluation(self, run: RunHandle, evaluation: EvaluationReport) -> None:
        if not self.monitor.is_of_epochs:
            self._look(run, evaluation.step, self.monitor.value(evaluation.figures))

    def on_epoch(self, run: RunHandle, epoch: EpochReport) -> None:
        if self.monitor.is_of_epochs and epoch.loss is not None:
            self._look(run, epoch.step, epoch.loss)

    def _look(self, run: RunHandle, step: int, value: float) -> None:
        if self.monitor.is_better(value, self.best, by=self.min_delta):
            self.best, self.best_step, self.num_worse = value, step, 0
        else:
            self.num_worse += 1
        self._stop_if_due(run)

    def _stop_if_due(self, run: RunHandle) -> None:
        if self.num_worse >= self.patience:
            best = (
                ""
                if self.best is None
                else f": {self.best:.6g} at step {self.best_step} was the best"
            )
            run.stop(f"{self.monitor.name} was not better in {self.num_worse} evaluations{best}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "num_worse": self.num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_step, self.num_worse = (
            state["best"],
            state["best_step"],
            state["num_worse"],
        )
