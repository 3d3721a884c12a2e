"""A rank's training run as its parts see it, and what a part may do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.base.errors import JobError
from paceline.base.files import write_json
from paceline.checkpoint.read import Checkpoint
from paceline.job import Job
from paceline.job.order import Window
from paceline.launch.process.context import RankContext
from paceline.runs.folder import SPLIT
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.training import state
from paceline.training.clipping import squared_norms
from paceline.training.prefetch import Fed
from paceline.training.run_log import RunLog, learning_rate
from paceline.training.settings import Settings
from paceline.training.state import StateOwner
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

    A job gives parts of its own as `parts=`, functions that make one of the run; see docs/callbacks.md. All ranks have
    the same parts in the same order. The constructor, `restored`, `settled`, `saving`, `finished` and `summary` come
    after the same step on all ranks, and may enter collectives of all. Replicas that take steps of their own
    (`local=H`) may be in different steps otherwise: there `before_step` and `gradients` may enter those
    of the ranks of one replica, and `stepped`, `document` and `figures` none.
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

    def stepped(self, taken: StepTaken) -> None:
        """This rank has taken a step, which the run counts now. Ranks may be in different steps: nothing here is
        collective."""

    def counted(self) -> None:
        """The run has counted a step, whoever took it; after `stepped` of all parts. Not collective either."""

    def settled(self) -> None:
        """Ranks are after the same step, and the run may be evaluated and saved. Called again if a part wants it."""

    def saving(self) -> None:
        """The run is saved, or copied in memory, as it is now. Collective."""

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
class RankRun:
    """What the parts of a run share on a rank: one that takes its steps, or a server."""

    context: RankContext
    job: Job
    plan: Plan
    settings: Settings
    stepper: StateOwner
    log: RunLog
    parts: list[RunPart] = field(default_factory=list)
    step: int = 0  # steps that were taken
    samples: int = 0
    epoch: int = 0  # of the last step
    # What parts are to do when ranks are settled: "compare", "evaluate", "epoch", "save".
    due: set[str] = field(default_factory=set)
    stop: bool = False  # some rank was asked to stop, or callbacks or the script want something
    wants_end: bool = False  # this rank's script has called run.stop
    ended: str | None = None  # why a callback or the observer ended the run, if one did
    is_copied: bool = False  # whether it goes on from a copy in memory
    _told: dict[str, list[Callable[..., None]]] = field(default_factory=dict)  # by moment

    @property
    def run_dir(self) -> Path | None:
        return self.settings.run_dir

    @property
    def num_ranks(self) -> int:
        """Ranks that come to every moment of the parts together."""
        return self.context.world_size

    @property
    def num_writers(self) -> int:
        """Ranks that write checkpoints, which are the first ones."""
        return self.context.world_size

    def warn(self, text: str) -> None:
        """Say what is alike on all ranks."""
        self.log.display.say(text)

    def keep_alive(self) -> None:
        """Called while this rank waits for callbacks or a save."""

    def begin_save(self, *, last: bool) -> None:
        """A save is next on this rank. last: whether nothing is trained after it."""

    def set_mode(self, *, trains: bool) -> None:
        """Let the weights be in place that are trained, or those that are evaluated, saved and given to users.
        Collective."""

    def takes(self, word: str) -> bool:
        """Whether something is due; it is not any more."""
        is_due = word in self.due
        self.due.discard(word)
        return is_due

    def count(self, window: Window) -> None:
        """A step was made of this window."""
        self.step, self.samples, self.epoch = (
            self.step + 1,
            self.samples + window.count,
            window.epoch,
        )

    def step_figures(self, window: Window, step_s: float) -> dict[str, Any]:
        """Return what is written down of the step that was counted last."""
        return {
            "step": self.step,
            "epoch": window.epoch,
            "samples": self.samples,
            "lr": learning_rate(self.stepper.optimizer),
            "step_s": step_s,
        }

    def note(self, **figures: Any) -> None:
        """Append a line to metrics.jsonl, on rank 0."""
        self.log.note(self.step, **figures)

    def tell(self, moment: str, *values: Any) -> None:
        """Let the parts know of a moment at which they may do something; see `RunPart`."""
        if moment not in self._told:
            self._told[moment] = [
                getattr(part, moment)
                for part in self.parts
                if getattr(type(part), moment) is not getattr(RunPart, moment)
            ]
        for told in self._told[moment]:
            told(*values)

    def settle(self) -> None:
        """Let every part do what is due, until nothing is. Collective."""
        self.tell("settled")
        while self.due:
            self.tell("settled")

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

    def without_steps(self) -> JobError:
        """Return the error of a run that took no step."""
        return JobError(
            "there was nothing to train on: no step was taken"
            if self.ended is None
            else f"a callback stopped the run before its first step: {self.ended}"
        )

    def summary(self) -> dict[str, Any]:
        """Return the figures of every kind of run, and say so if it was ended before its last step. Collective: every
        rank has finished its parts then."""
        summary: dict[str, Any] = {
            "plan": str(self.plan),
            "world_size": self.context.world_size,
            "steps": self.step,
            "samples": self.samples,
            **self.log.summary(),
        }
        if self.ended is not None and self.step != self.job.total_steps:
            self.log.display.say(f"stopped after step {self.step}: {self.ended}")
            summary["stopped"] = self.ended
        for part in self.parts:
            summary |= part.summary()
        return summary

    def greatest(self, value: int) -> int:
        """Return the greatest value over all ranks. Collective."""
        if self.num_ranks == 1:
            return value
        greatest = torch.tensor(value, dtype=torch.int64, device=self.context.device)
        torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX)
        return int(greatest)


@dataclass
class TrainingRun(RankRun):
    """What the loop shares with them on a rank that takes steps."""

    stepper: Stepper

    @property
    def mesh(self) -> Mesh:
        return self.stepper.mesh

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

    def tell_layout(self) -> None:
        """Say how the model was laid out, where there is something to say."""
        report = self.stepper.layout.report
        for line in report.lines:
            self.log.display.say(line)
        if report.document and self.run_dir is not None and self.context.rank == 0:
            write_json(self.run_dir / SPLIT, report.document)

    def set_mode(self, *, trains: bool) -> None:
        if self.stepper.has_modes and self.stepper.trains is not trains:
            self.beat("optimizer")
            self.stepper.set_mode(trains=trains)
