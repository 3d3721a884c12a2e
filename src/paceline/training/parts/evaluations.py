"""Evaluations of a run: at the end of each epoch, at the end, and when callbacks ask for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from paceline.base.errors import JobError
from paceline.job.order import Order
from paceline.strategies.compose import end_evaluation
from paceline.training.evaluate import Evaluator
from paceline.training.feed import DataShard, evaluated_part, is_stream
from paceline.training.optimizers.schedule import check_monitored, step_by_metrics
from paceline.training.parts.callbacks import Callbacks
from paceline.training.parts.saves import Saves
from paceline.training.run import RankRun, RunPart, TrainingRun


class RunEvaluator(Protocol):
    """How a run is evaluated."""

    def evaluate(self) -> tuple[dict[str, float], JobError | None]:
        """Return "loss" and every metric, and why this rank refuses a metric, if it does. Collective."""

    def step_schedule(self, metrics: Mapping[str, float]) -> None:
        """Step the schedules that wait for a figure of an evaluation."""


class Evaluations(RunPart):
    """Evaluates the model, steps a schedule by the metrics, and tells callbacks of evaluations and epochs."""

    def __init__(
        self, run: RankRun, evaluator: RunEvaluator, saves: Saves, callbacks: Callbacks
    ) -> None:
        self.run, self.evaluator, self.saves, self.callbacks = run, evaluator, saves, callbacks
        self.order = None if is_stream(run.job.data) else Order.of(run.job)
        self.evaluated_step: int | None = None
        self.scheduled_step = -1  # after which an evaluation stepped the schedule last
        self.ended_epochs: list[int] = []  # that callbacks are to hear of

    def counted(self) -> None:
        if self.order is not None and self.order.ends_epoch(self.run.step):
            self.run.due |= {"evaluate", "epoch"}
            self.ended_epochs.append(self.run.epoch)

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
        run = self.run
        if run.job.validation is None or self.evaluated_step == run.step:
            return
        self.evaluated_step = run.step
        figures, refused = self.evaluator.evaluate()
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
            self.evaluator.step_schedule(run.log.evaluated)
            self.scheduled_step = run.step


class RanksEvaluator:
    """Evaluates on all ranks that train together; see `RunEvaluator`."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        if run.settings.is_trial:
            return
        names = None
        if run.job.validation is not None and not is_stream(run.job.validation):
            names = self._evaluator.names_of_all(self._evaluator.look())
            # What was gathered may be of weights that a checkpoint replaces.
            end_evaluation(run.stepper.synchronisers)
        check_monitored(run.stepper.schedule, run.job, names)

    def evaluate(self) -> tuple[dict[str, float], JobError | None]:
        run, job, stepper = self.run, self.run.job, self.run.stepper
        run.set_mode(trains=False)
        stepper.step_sync.drain()
        evaluator = self._evaluator
        sample_share = evaluated_part(job.validation, batch=job.batch, part=evaluator.part)
        with (
            stepper.step_sync.global_weights_in_place(),
            stepper.evaluating(sample_share, step=run.step),
        ):
            return evaluator.figures(job.validation)

    def step_schedule(self, metrics: Mapping[str, float]) -> None:
        step_by_metrics(self.run.stepper.schedule, self.run.job, metrics)

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
