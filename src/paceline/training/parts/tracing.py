"""A trace of a launch's steps: which work each rank does when."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.read import Checkpoint
from paceline.training import trace
from paceline.training.run import RunPart, TrainingRun


class Tracing(RunPart):
    """Records the first steps of a launch on every rank, and brings the ranks' records together at its end."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run

    def restored(self, checkpoint: Checkpoint | None) -> None:
        """The first step is left out, as models are captured in it."""
        run = self.run
        if run.settings.trace_steps:
            run.stepper.trace = trace.TraceRecorder(
                run.context.rank, range(run.step + 1, run.step + 1 + run.settings.trace_steps)
            )

    def finished(self) -> None:
        if self.run.stepper.trace is not None and self._logs is not None:
            self.run.stepper.trace.write(self._logs)

    def summary(self) -> Mapping[str, Any]:
        run, logs = self.run, self._logs
        if run.stepper.trace is not None and logs is not None and run.context.rank == 0:
            trace.bring_together(logs, logs.parent, run.context.world_size)
        return {}

    @property
    def _logs(self) -> Path | None:
        return self.run.run_dir / "logs" if self.run.run_dir is not None else None
