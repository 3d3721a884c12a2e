"""Keeps the checkpoints of the best evaluations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.base.errors import JobError
from paceline.callbacks.monitor import Monitor
from paceline.job.callback import Callback, CheckpointReport, EvaluationReport
from paceline.runs.folder import BEST, checkpoint_of

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.job.callback import RunHandle


class KeepBest(Callback):
    """Saves a checkpoint after each evaluation that is among the `n` best, and deletes it when it
    no longer is.

    The newest checkpoint is kept in any case. Checkpoints of `save_every` are not its own, so it
    keeps them, too.

    Args:
        monitor: "validation_loss" or a metric of the job.
        n: How many checkpoints are kept; at least 1.
        mode: Whether "min" or "max" is better; by default "min" for losses and "max" for metrics.

    Raises:
        JobError: a value that makes no sense.
    """

    def __init__(
        self,
        monitor: str = "validation_loss",
        n: int = 1,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise JobError(f"KeepBest's n must be a whole number of at least 1, got {n!r}")
        self.monitor, self.n = Monitor(monitor, mode), n
        # Step and figure of each kept checkpoint, the best first. Of equal figures the earlier one
        # comes first.
        self.kept: list[tuple[int, float]] = []
        # Steps of the checkpoints that this callback saved and that still exist.
        self.saved_steps: list[int] = []

    def problem(self, job: Job) -> str | None:
        if self.monitor.is_of_epochs:
            return "KeepBest keeps the best evaluations, and 'loss' is no figure of an evaluation"
        return self.monitor.problem(job, "KeepBest")

    def on_start(self, run: RunHandle) -> None:
        if run.step == 0:
            self.kept, self.saved_steps = [], []
        self._note(run.folder)

    def on_evaluation(self, run: RunHandle, evaluation: EvaluationReport) -> None:
        value = self.monitor.value(evaluation.figures)
        place = next(
            (
                number
                for number, (_, kept) in enumerate(self.kept)
                if self.monitor.is_better(value, kept)
            ),
            len(self.kept),
        )
        if value != value or place == self.n:
            return
        self.kept = [*self.kept[:place], (evaluation.step, value), *self.kept[place:]][: self.n]
        if not run.save_every or evaluation.step % run.save_every:
            self.saved_steps.append(evaluation.step)
        run.save()

    def on_save(self, run: RunHandle, checkpoint: CheckpointReport) -> None:
        self._note(run.folder)
        wanted = {checkpoint.step, *(step for step, _ in self.kept)}
        for step in (step for step in self.saved_steps if step not in wanted):
            shutil.rmtree(checkpoint_of(run.folder, step), ignore_errors=True)
        self.saved_steps = [step for step in self.saved_steps if step in wanted]

    def _note(self, run_dir: Path) -> None:
        from paceline.base.files import write_json

        write_json(
            run_dir / BEST,
            {
                "monitor": self.monitor.name,
                "mode": self.monitor.mode,
                "checkpoints": [{"step": step, "value": value} for step, value in self.kept],
            },
        )

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [list(entry) for entry in self.kept], "own": self.saved_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept, self.saved_steps = (
            [(step, value) for step, value in state["kept"]],
            list(state["own"]),
        )


def ranking_of(run_dir: Path) -> Monitor | None:
    """Return the figure by which the best checkpoints of a run are kept; None if they are not."""
    path = run_dir / BEST
    if not path.exists():
        return None
    document = json.loads(path.read_text())
    return Monitor(document["monitor"], document["mode"])
