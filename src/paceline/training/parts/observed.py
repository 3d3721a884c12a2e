"""A run's observer, as a part of the run."""

from __future__ import annotations

from paceline.training.prefetch import Fed
from paceline.training.run import RunPart, StepTaken, TrainingRun
from paceline.training.settings import Observer


class Observed(RunPart):
    """Lets an observer look on."""

    def __init__(self, run: TrainingRun, observer: Observer) -> None:
        self.run, self.observer = run, observer

    def before_step(self, fed: Fed) -> None:
        if not self.run.stepper.has_begun:
            self.observer.initial(self.run.stepper)
        self.observer.samples(self.run.step, fed.batches)

    def gradients(self) -> None:
        self.observer.gradients(self.run.step, self.run.stepper)

    def stepped(self, taken: StepTaken) -> None:
        run = self.run
        if self.observer.weights(run.step - 1, run.stepper, run.log.loss):
            run.ended = "its observer said so"
