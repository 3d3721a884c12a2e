"""Callbacks, and the reports that they get on a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step that was taken."""

    step: int  # from 1
    epoch: int  # from 0
    samples: int  # samples that the run has used until now
    loss: float | None  # mean over the step's samples; None if loss scaling skipped the step
    lr: float | None  # of the optimizer's first group
    step_s: float  # seconds that the step took
    # All figures of the step in `metrics.jsonl`, such as "gradient_norm".
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """An evaluation on the validation data, after `step`."""

    step: int
    epoch: int
    validation_loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # the job's metrics by name

    @property
    def figures(self) -> dict[str, float]:
        """The validation loss and the metrics, by name."""
        return {"validation_loss": self.validation_loss, **self.metrics}


@dataclass(frozen=True, slots=True)
class EpochReport:
    """An epoch whose last step was `step`."""

    epoch: int  # from 0
    step: int
    samples: int
    # The mean over the epoch's samples, in the steps that this process has seen; None if it saw
    # none.
    loss: float | None
    evaluation: EvaluationReport | None = None  # at the epoch's end; None without validation data

    @property
    def figures(self) -> dict[str, float]:
        """The loss, the validation loss and the metrics, by name."""
        return {
            **({"loss": self.loss} if self.loss is not None else {}),
            **(self.evaluation.figures if self.evaluation is not None else {}),
        }


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A checkpoint that is complete."""

    step: int
    path: Path


@dataclass
class Requests:
    """Requests of callbacks to the ranks, which fulfil them after their current step."""

    stop: str | None = None
    failed: str | None = None
    evaluate: bool = False
    save: bool = False

    def __bool__(self) -> bool:
        return self.stop is not None or self.failed is not None or self.evaluate or self.save

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def add(self, other: Mapping[str, Any]) -> None:
        self.stop = self.stop if self.stop is not None else other.get("stop")
        self.failed = self.failed if self.failed is not None else other.get("failed")
        self.evaluate |= bool(other.get("evaluate"))
        self.save |= bool(other.get("save"))


@dataclass
class RunHandle:
    """A run, as its callbacks see it."""

    job: Any  # the `Job`, whose module imports this one
    plan: str
    folder: Path  # the run folder
    total_steps: int | None  # None if the end of a stream decides
    save_every: int | None = None  # steps between the checkpoints that the user asked for
    step: int = 0  # the last step that callbacks were told of
    epoch: int = 0  # the epoch of this step, from 0
    restarts: int = 0  # how often the ranks were started again
    _read_history: Callable[[Path], list[dict[str, Any]]] = field(
        default=lambda folder: [], repr=False
    )
    _requests: Requests = field(default_factory=Requests, repr=False)
    _weights: Callable[[], dict[str, torch.Tensor]] | None = field(default=None, repr=False)
    _log: Callable[[Mapping[str, Any]], None] | None = field(default=None, repr=False)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Read all lines that `metrics.jsonl` has until now, each as a mapping.

        The file is read at each call.
        """
        return self._read_history(self.folder)

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run as done, on all ranks after the same step.

        This is the current step if ranks wait for the callback. From `on_step` it is one of the
        next steps.
        """
        self._requests.add({"stop": reason})

    def evaluate(self) -> None:
        """Have the model evaluated after this step, or from `on_step` after one of the next steps.

        `on_evaluation` gets the result. Nothing happens if the step is evaluated already.

        Raises:
            UsageError: the job has no validation data.
        """
        if self.job.validation is None:
            raise UsageError(
                "the job has no validation data to evaluate on", hint="give the Job validation="
            )
        self._requests.evaluate = True

    def save(self) -> None:
        """Have a checkpoint saved after this step, or from `on_step` after one of the next steps.

        `on_save` is called when it is complete. The checkpoint holds the state that callbacks have
        when all of them were told of the step.
        """
        self._requests.save = True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model's current weights, whole, in this process's memory.

        They have the names that they have in the model's own `state_dict`.

        Raises:
            UsageError: ranks do not wait now, for example in `on_step`.
            OutOfMemory: the weights would not fit in this process.
        """
        if self._weights is None:
            raise UsageError(
                "run.state_dict() was asked for while the ranks go on",
                hint="on_evaluation, on_epoch, on_save, on_start and on_end are called while they wait",
            )
        return self._weights()

    def log(self, values: Mapping[str, Any]) -> None:
        """Give numbers, text and images by name to all that logs the run, and numbers and text to
        `logged.jsonl`.

        An image is an array or tensor of shape (height, width), (height, width, channels) or
        (channels, height, width), or a figure of matplotlib.
        """
        if self._log is not None:
            self._log(values)


class Callback:
    """An object that watches a run and controls it. Every method is optional.

    The methods run in one process, whatever the plan: the process that called `pl.train` or
    `paceline train`, or the first rank under torchrun and Slurm and in a trial of a search. They
    never run inside a collective. Ranks go on while `on_step` runs, and wait while the other
    methods run.

    A callback with `state_dict` and `load_state_dict` has state: values that JSON can hold.
    Checkpoints keep it, and a run that resumes from a checkpoint gives it back, under any plan.

    An exception ends the run: it saves a checkpoint, and `pl.train` raises `CallbackError` from the
    exception.
    """

    def problem(self, job: Any) -> str | None:
        """Explain why the job can't have this callback; None if it can.

        This is called when the job is made.
        """
        return None

    def on_start(self, run: RunHandle) -> None:
        """Handle the start: ranks are ready, and the first step is next.

        A restart of the ranks calls this again.
        """

    def on_step(self, run: RunHandle, step: StepReport) -> None:
        """Handle a step that was taken.

        No step is left out. Ranks do not wait, and may be some steps further.
        """

    def on_figures(self, run: RunHandle, step: int, figures: Mapping[str, float | None]) -> None:
        """Handle the figures of a step beside its loss: what `compute` returns, or what `ctx.log`
        and `run.log` of a script's own loop are given.

        Those of a script come when its ranks have joined them, up to 100 steps later. A figure that
        is no finite number is None. Ranks do not wait.
        """

    def on_epoch(self, run: RunHandle, epoch: EpochReport) -> None:
        """Handle the end of an epoch: its last step was taken, and its evaluation is done."""

    def on_evaluation(self, run: RunHandle, evaluation: EvaluationReport) -> None:
        """Handle an evaluation of the model on the validation data."""

    def on_save(self, run: RunHandle, checkpoint: CheckpointReport) -> None:
        """Handle a checkpoint that is complete."""

    def on_log(self, run: RunHandle, step: int, values: Mapping[str, Any]) -> None:
        """Handle a call of `run.log`, which gives numbers, text and pictures, as images of Pillow, by name."""

    def on_end(self, run: RunHandle, result: Any) -> None:
        """Handle the end of a run that is done: it took all steps, or a callback stopped it."""

    def on_failure(self, run: RunHandle, error: BaseException) -> None:
        """Handle a run that ended before it was done: it was interrupted, or a rank or a callback
        failed.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps of this callback, as values that JSON can
        hold.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state that `state_dict` returned when the checkpoint was written."""


HOOKS = (
    "on_start",
    "on_step",
    "on_figures",
    "on_epoch",
    "on_evaluation",
    "on_save",
    "on_log",
    "on_end",
    "on_failure",
    "state_dict",
)


def hooks_of(callback: Callback) -> frozenset[str]:
    """Return the names of the methods that a callback has of its own."""
    return frozenset(
        name
        for name in HOOKS
        if getattr(type(callback), name) is not getattr(Callback, name) or name in vars(callback)
    )


def all_hooks(callbacks: Iterable[Callback]) -> frozenset[str]:
    return frozenset(name for callback in callbacks for name in hooks_of(callback))
