"""A rank's training run as its parts see it, and what a part may do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.base.errors import JobError
from paceline.base.files import write_json
from paceline.checkpoint.read import Checkpoint
from paceline.job import Job
from paceline.launch.process.context import RankContext
from paceline.runs.folder import SPLIT
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.training import state
from paceline.training.clipping import squared_norms
from paceline.training.prefetch import Fed
from paceline.training.run_log import RunLog
from paceline.training.settings import Settings
from paceline.training.stepper import Stepper, StepResult


@dataclass(frozen=True, slots=True)
class StepTaken:
    """A step that this rank took."""

    fed: Fed  # its samples
    result: StepResult
    step_s: float
    input_s: float  # of step_s, until the samples were there
    loss_scale: float | None  # that its loss was multiplied by; None without loss scaling


class RunPart:
    """One feature of a run beside its steps, with the moments at which it may do something, on every rank.

    A job gives parts of its own as `parts=`, functions that make one of the run; see docs/parts.md. All ranks have the
    same parts in the same order. The constructor, `restored`, `settled`, `finished` and `summary` come after the same
    step on all ranks, and may enter collectives of all. Replicas that take steps of their own (`local=H`) may be in
    different steps otherwise: there `before_step` and `gradients` may enter those of the ranks of one replica, and
    `stepped`, `before_update`, `document` and `figures` none.
    """

    def restored(self, checkpoint: Checkpoint | None) -> None:
        """The run goes on from here. checkpoint: what it was restored from; None if it begins."""

    def before_step(self, fed: Fed) -> None:
        """The samples of the next step are there, and its first forward is next."""

    def gradients(self) -> None:
        """Gradients are those of the whole window, and not yet clipped. They are read here, not changed.

        A step that is skipped has none. A step of the job's own was taken before, and each gradient is the sum over
        its updates.
        """

    def before_update(self) -> None:
        """What follows writes to the weights and the optimizer's state."""

    def stepped(self, taken: StepTaken) -> None:
        """A step was taken, on this rank. It is counted."""

    def settled(self) -> None:
        """Ranks are after the same step, and the run may be evaluated and saved. Called again if a part wants it."""

    def finished(self) -> None:
        """All steps are taken, and the last one is settled."""

    def document(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps of the part, as JSON, under names of its own. That of rank 0 counts."""
        return {}

    def figures(self) -> Mapping[str, Any]:
        """Return what a copy in memory keeps in addition; `take_figures` gets it back."""
        return {}

    def take_figures(self, figures: Mapping[str, Any]) -> None:
        """Know what the part knew at the copy that the run goes on from."""

    def summary(self) -> Mapping[str, Any]:
        """Return the part's figures in the run's summary. Collective."""
        return {}


@dataclass
class TrainingRun:
    """What the loop and the parts of one rank's run share."""

    context: RankContext
    job: Job
    plan: Plan
    settings: Settings
    mesh: Mesh
    stepper: Stepper
    log: RunLog
    parts: list[RunPart] = field(default_factory=list)
    step: int = 0  # steps that were taken
    samples: int = 0
    epoch: int = 0  # of the last step
    # What parts are to do when ranks are settled: "compare", "evaluate", "epoch", "save".
    due: set[str] = field(default_factory=set)
    stop: bool = False  # some rank was asked to stop, or callbacks want something
    ended: str | None = None  # why a callback or the observer ended the run, if one did
    is_copied: bool = False  # whether it goes on from a copy in memory

    @property
    def run_dir(self) -> Path | None:
        return self.settings.run_dir

    def takes(self, word: str) -> bool:
        """Whether something is due; it is not any more."""
        is_due = word in self.due
        self.due.discard(word)
        return is_due

    def beat(self, phase: str) -> None:
        """Give a sign of life in a phase of a step."""
        self.context.beat(phase)
        if self.stepper.trace is not None:
            self.stepper.trace.phase(phase)

    def parts_of_job(self) -> list[RunPart]:
        """Make the parts that the job gives; none in a trial.

        Raises:
            JobError: one is no part.
        """
        parts = [] if self.settings.is_trial else [make(self) for make in self.job.parts]
        for part in parts:
            if not isinstance(part, RunPart):
                raise JobError(
                    f"parts must hold functions that return a pl.RunPart, got a {type(part).__name__}"
                )
        return parts

    def note(self, **figures: Any) -> None:
        """Append a line to metrics.jsonl, on rank 0."""
        self.log.note(self.step, **figures)

    def tell_gradients(self, stepper: Stepper) -> None:
        """Let every part know that gradients are complete."""
        for part in self.parts:
            part.gradients()

    def gradient_norms(self) -> dict[str, float]:
        """Return the norm of each parameter's gradient by name, over all parts of the model; 0 where there is none.

        The same on all ranks; where replicas take steps of their own, on those of one replica. Collective among the
        ranks of one replica.
        """
        stepper = self.stepper
        squares = squared_norms(
            stepper.trainable,
            stepper.parameters,
            stepper.layout.owned,
            self.mesh,
            self.context.device,
        )
        return dict(zip(stepper.trainable, squares.sqrt().tolist(), strict=True))

    def before_update(self) -> None:
        """Let every part know that weights are written to next. Collective."""
        for part in self.parts:
            part.before_update()

    def tell_layout(self) -> None:
        """Say how the model was laid out, where there is something to say."""
        report = self.stepper.layout.report
        for line in report.lines:
            self.log.display.say(line)
        if report.document and self.run_dir is not None and self.context.rank == 0:
            write_json(self.run_dir / SPLIT, report.document)

    def settle(self) -> None:
        """Let every part do what is due, until nothing is. Collective."""
        while True:
            for part in self.parts:
                part.settled()
            if not self.due:
                return

    def set_mode(self, *, trains: bool) -> None:
        """Let the weights be in place that are trained, or those that are evaluated, saved and given to users.
        Collective."""
        if self.stepper.has_modes and self.stepper.trains is not trains:
            self.beat("optimizer")
            self.stepper.set_mode(trains=trains)

    def document(self) -> dict[str, Any]:
        """Return what of the run's state is not a tensor.

        Raises:
            JobError: two parts keep something under one name.
        """
        document = state.document(self.stepper, step=self.step, samples=self.samples)
        for part in self.parts:
            kept = part.document()
            if taken := document.keys() & kept:
                raise JobError(
                    f"document() of {type(part).__name__} has '{min(taken)}', a name that is taken"
                )
            document |= kept
        return document

    def figures(self) -> dict[str, Any]:
        """Return what a run that goes on from a copy knows beside its state."""
        figures: dict[str, Any] = {
            "epoch": self.epoch,
            "due": sorted(self.due),
            "loss": self.log.loss,
        }
        for part in self.parts:
            figures |= part.figures()
        return figures

    def take_figures(self, figures: Mapping[str, Any]) -> None:
        """Know what the run knew at its last copy."""
        self.epoch, self.due = figures["epoch"], self.due | set(figures["due"])
        self.log.loss = figures["loss"]
        for part in self.parts:
            part.take_figures(figures)

    def greatest(self, value: int) -> int:
        """Return the greatest value over all ranks. Collective."""
        if self.context.world_size == 1:
            return value
        greatest = torch.tensor(value, dtype=torch.int64, device=self.context.device)
        torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX)
        return int(greatest)
