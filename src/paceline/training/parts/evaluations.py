"""Evaluations of a run: at the end of each epoch, at the end, and when callbacks ask for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.job.order import Order
from paceline.strategies.compose import end_evaluation
from paceline.training.evaluate import Evaluator
from paceline.training.feed import DataShard, evaluated_part, is_stream
from paceline.training.optimizers.schedule import check_monitored, step_by_metrics
from paceline.training.parts.callbacks import Callbacks
from paceline.training.parts.saves import Saves
from paceline.training.run import RunPart, StepTaken, TrainingRun


class Evaluations(RunPart):
    """Evaluates the model, steps a schedule by the metrics, and tells callbacks of evaluations and epochs."""

    def __init__(self, run: TrainingRun, saves: Saves, callbacks: Callbacks) -> None:
        self.run, self.saves, self.callbacks = run, saves, callbacks
        self.order = None if is_stream(run.job.data) else Order.of(run.job)
        self.evaluated_step: int | None = None
        self.scheduled_step = -1  # after which an evaluation stepped the schedule last
        self.ended_epochs: list[int] = []  # that callbacks are to hear of
        if not run.settings.is_trial:
            check_monitored(run.stepper.schedule, run.job, self._measured())

    def stepped(self, taken: StepTaken) -> None:
        if self.order is not None and self.order.ends_epoch(self.run.step):
            self.run.due |= {"evaluate", "epoch"}
            self.ended_epochs.append(taken.fed.window.epoch)

    def settled(self) -> None:
        """Callbacks hear of the evaluation and the epoch before the checkpoint is saved that has their state."""
        if self.run.takes("evaluate"):
            self.evaluate()
        if self.run.takes("epoch"):
            epochs, self.ended_epochs = self.ended_epochs, []
            for epoch in epochs:
                self.callbacks.tell("on_epoch", "epoch", epoch=epoch, samples=self.run.samples)

    def figures(self) -> Mapping[str, Any]:
        return {
            "evaluated": self.run.log.evaluated,
            "evaluated_step": self.evaluated_step,
            "scheduled_step": self.scheduled_step,
            "ended_epochs": self.ended_epochs,
        }

    def take_figures(self, figures: Mapping[str, Any]) -> None:
        self.run.log.evaluated = figures["evaluated"]
        self.evaluated_step = figures["evaluated_step"]
        self.scheduled_step = figures["scheduled_step"]
        self.ended_epochs = figures["ended_epochs"]

    def evaluate(self) -> None:
        """Evaluate the model, if that has not been done after this step. Collective.

        Raises:
            JobError: a metric is refused. What was trained is saved.
        """
        run, stepper = self.run, self.run.stepper
        if run.job.validation is None or self.evaluated_step == run.step:
            return
        self.evaluated_step = run.step
        run.set_mode(trains=False)
        run.before_update()  # replicas may have shared weights put in place of their own
        stepper.step_sync.drain()
        sample_share = evaluated_part(
            run.job.validation, batch=run.job.batch, part=self._evaluator.part
        )
        with (
            stepper.step_sync.global_weights_in_place(),
            stepper.evaluating(sample_share, step=run.step),
        ):
            figures, refused = self._evaluator.figures(run.job.validation)
        if run.greatest(int(refused is not None)):  # what was trained is not lost with a metric
            self.saves.save(last=True)
            if refused is not None:
                raise refused
            run.greatest(0)  # which the rank that tells of it ends
        run.log.note_evaluation(run.step, figures)
        self._step_schedule()
        self.callbacks.tell(
            "on_evaluation",
            "evaluation",
            epoch=run.epoch,
            validation_loss=figures["loss"],
            metrics={name: value for name, value in figures.items() if name != "loss"},
        )

    def _step_schedule(self) -> None:
        run = self.run
        if (
            run.stepper.schedule is not None
            and not run.settings.is_trial
            and (run.log.speed.steps or run.is_copied)
            and self.scheduled_step != run.step
            and self.order is not None
            and self.order.ends_epoch(run.step)
        ):
            step_by_metrics(run.stepper.schedule, run.job, run.log.evaluated)
            self.scheduled_step = run.step

    @property
    def _evaluator(self) -> Evaluator:
        run, stepper = self.run, self.run.stepper
        part = DataShard.of(run.plan, run.mesh, run.settings.shares)
        return Evaluator(
            stepper.model,
            stepper.parts,
            run.job,
            part,
            run.mesh,
            run.context.device,
            run.context.beat,
        )

    def _measured(self) -> list[str] | None:
        """Return the names of the figures of an evaluation; None if the job evaluates nothing. Collective."""
        job = self.run.job
        if job.validation is None or is_stream(job.validation):
            return None
        names = self._evaluator.look()
        # What was gathered may be of weights that a checkpoint replaces.
        end_evaluation(self.run.stepper.synchronisers)
        return names
