"""Figures of each step, in metrics.jsonl and the journal, once all ranks know its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.training.run import RunPart, StepTaken, TrainingRun
from paceline.training.stepper import StepResult


class StepLog(RunPart):
    """Writes a step down when its loss is known, which is later where replicas take steps of their own."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._unmet: list[dict[str, Any]] = []  # figures of steps since ranks met

    def stepped(self, taken: StepTaken) -> None:
        run, result, window = self.run, taken.result, taken.fed.window
        run.log.speed.add(window.count, taken.step_s, input_s=taken.input_s)
        figures = run.step_figures(window, taken.step_s)
        if taken.loss_scale is not None:
            figures["loss_scale"] = taken.loss_scale
        if result.gradient_norm is not None:
            figures["gradient_norm"] = result.gradient_norm
        if result.is_skipped:
            figures |= {"skipped": True, **({"spike": result.spike} if result.spike else {})}
        if result.metrics:
            run.log.figures = figures["metrics"] = result.metrics
        self._unmet.append(figures)
        run.log.journal.note(run.step, window, skipped=result.is_skipped)
        self.learn(result)

    def summary(self) -> Mapping[str, Any]:
        scaling, speed = self.run.stepper.scaling, self.run.log.speed
        figures: dict[str, Any] = {"input_s": speed.input_s / max(speed.steps, 1)}
        if scaling is not None:
            figures |= {"loss_scale": scaling.scale, "skipped_steps": scaling.skipped_steps}
        return figures

    def learn(self, result: StepResult) -> None:
        """Record the steps whose losses are known now."""
        log = self.run.log
        if result.losses:
            for figures, loss in zip(self._unmet, result.losses, strict=True):
                # The loss of a step that was skipped may be anything.
                log.note(**figures, loss=loss if math.isfinite(loss) else None)
            finite = (loss for loss in reversed(result.losses) if math.isfinite(loss))
            log.loss = next(finite, log.loss)
            self._unmet = []
            log.journal.settle(result.digest)
            log.show(self.run.step, self.run.job.total_steps, self.run.epoch)
