"""A trace of a launch's steps: which work each rank does when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from itertools import chain
from typing import Any

from paceline.checkpoint.read import Checkpoint
from paceline.launch.collectives.values import values_of_all
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

    def summary(self) -> Mapping[str, Any]:
        run, recorder = self.run, self.run.stepper.trace
        if recorder is not None and run.run_dir is not None:
            spans = [astuple(span) for span in recorder.spans]
            everyone = [spans]
            if run.num_ranks > 1:
                everyone = values_of_all(spans, device=run.context.device)
            if run.context.rank == 0:
                together = [trace.TraceSpan(*span) for span in chain(*everyone)]
                trace.write(together, run.run_dir, world_size=run.num_ranks)
        return {}
