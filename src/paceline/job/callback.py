"""What a callback is, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import UsageError

if TYPE_CHECKING:
    import torch

    from paceline.job import Job


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step that was taken.

    step: from 1. epoch: from 0. samples: that the run has used until now. loss: the mean over the step's samples; None
        where loss scaling skipped the step. lr: of the optimizer's first group. step_s: seconds that it took.
    figures: all that `metrics.jsonl` says of it, such as "gradient_norm".
    """

    step: int
    epoch: int
    samples: int
    loss: float | None
    lr: float | None
    step_s: float
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """An evaluation on the validation data, after `step`. metrics: those of the job, by name."""

    step: int
    epoch: int
    validation_loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """The validation loss and the metrics, by name."""
        return {"validation_loss": self.validation_loss, **self.metrics}


@dataclass(frozen=True, slots=True)
class EpochReport:
    """An epoch whose last step was `step`.

    epoch: from 0. loss: the mean over its samples, in the steps that this process has seen; None if it saw none.
    evaluation: of its end; None without validation data.
    """

    epoch: int
    step: int
    samples: int
    loss: float | None
    evaluation: EvaluationReport | None = None

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
    """What callbacks ask of the ranks; fulfilled after the step that ranks are at."""

    stop: str | None = None
    failed: str | None = None
    evaluate: bool = False
    save: bool = False

    def __bool__(self) -> bool:
        return self.stop is not None or self.failed is not None or self.evaluate or self.save

    def to_dict(self) -> dict[str, Any]:
        return {
            "stop": self.stop,
            "failed": self.failed,
            "evaluate": self.evaluate,
            "save": self.save,
        }

    def add(self, other: Mapping[str, Any]) -> None:
        self.stop = self.stop if self.stop is not None else other.get("stop")
        self.failed = self.failed if self.failed is not None else other.get("failed")
        self.evaluate |= bool(other.get("evaluate"))
        self.save |= bool(other.get("save"))


@dataclass
class RunHandle:
    """A run, as its callbacks see it.

    step: the last one that callbacks were told of. epoch: that it belongs to, from 0. total_steps: None if the end of a
        stream decides. save_every: steps between the checkpoints that the user asked for. folder: the run folder.
        restarts: how often the ranks were started again.
    """

    job: Job
    plan: str
    folder: Path
    total_steps: int | None
    save_every: int | None = None
    step: int = 0
    epoch: int = 0
    restarts: int = 0
    _read_history: Callable[[Path], list[dict[str, Any]]] = field(
        default=lambda folder: [], repr=False
    )
    _requests: Requests = field(default_factory=Requests, repr=False)
    _weights: Callable[[], dict[str, torch.Tensor]] | None = field(default=None, repr=False)
    _log: Callable[[Mapping[str, Any]], None] | None = field(default=None, repr=False)

    @property
    def history(self) -> list[dict[str, Any]]:
        """All that `metrics.jsonl` says until now, a mapping a line; read anew each time."""
        return self._read_history(self.folder)

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run as done, on all ranks after the same step: this one where ranks wait for the callback; from
        `on_step` one of the next."""
        self._requests.add({"stop": reason})

    def evaluate(self) -> None:
        """Have the model evaluated after this step, or from `on_step` after one of the next; `on_evaluation` is told.
        Nothing happens where the step is evaluated already.

        Raises:
            UsageError: the job has no validation data.
        """
        if self.job.validation is None:
            raise UsageError(
                "the job has no validation data to evaluate on", hint="give the Job validation="
            )
        self._requests.evaluate = True

    def save(self) -> None:
        """Have a checkpoint saved after this step, or from `on_step` after one of the next; `on_save` is told. It
        holds the state that callbacks have when all of them were told of the step."""
        self._requests.save = True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's weights as they are now, whole, in this process's memory, under the model's own names, as its
        `state_dict` has them.

        Raises:
            UsageError: ranks do not wait now, as in `on_step`.
            OutOfMemory: they would not fit in this process.
        """
        if self._weights is None:
            raise UsageError(
                "run.state_dict() was asked for while the ranks go on",
                hint="on_evaluation, on_epoch, on_save, on_start and on_end are called while they wait",
            )
        return self._weights()

    def log(self, values: Mapping[str, Any]) -> None:
        """Give numbers, text and images by name to whatever logs the run, and numbers and text to `logged.jsonl`.

        An image is an array or tensor of shape (height, width), (height, width, channels) or (channels, height,
        width), or a figure of matplotlib.
        """
        if self._log is not None:
            self._log(values)


class Callback:
    """Looks on a run and controls it. Every method is optional.

    The methods run once a run, whatever the plan, in the process that called `pl.train` or `paceline train`; under
    torchrun and Slurm, and in a trial of a search, on the first rank. They never run inside a collective. Ranks go on
    while `on_step` runs; while the others run, ranks wait.

    A callback with `state_dict` and `load_state_dict` has state: values that JSON can hold. Checkpoints keep it, and a
    run that goes on from one gives it back, under any plan.

    An exception ends the run: it saves a checkpoint, and `pl.train` raises `CallbackError` from the exception.
    """

    def problem(self, job: Job) -> str | None:
        """Why this callback can't be a callback of the job; None if it can. Asked when the job is made."""
        return None

    def on_start(self, run: RunHandle) -> None:
        """Ranks are ready, and the first step is next. After a restart of the ranks it is called again."""

    def on_step(self, run: RunHandle, step: StepReport) -> None:
        """A step was taken. Ranks do not wait, and may be some steps further; no step is left out."""

    def on_epoch(self, run: RunHandle, epoch: EpochReport) -> None:
        """The last step of an epoch was taken, and its evaluation is done."""

    def on_evaluation(self, run: RunHandle, evaluation: EvaluationReport) -> None:
        """The model was evaluated on the validation data."""

    def on_save(self, run: RunHandle, checkpoint: CheckpointReport) -> None:
        """A checkpoint is complete."""

    def on_log(self, run: RunHandle, step: int, values: Mapping[str, Any]) -> None:
        """`run.log` was called: numbers, text and `Image`s by name."""

    def on_end(self, run: RunHandle, result: Any) -> None:
        """The run is done: it took all steps, or a callback stopped it."""

    def on_failure(self, run: RunHandle, error: BaseException) -> None:
        """The run ended before it was done: it was interrupted, a rank failed, or a callback did."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback, as JSON can hold it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned when the checkpoint was written."""


HOOKS = (
    "on_start",
    "on_step",
    "on_epoch",
    "on_evaluation",
    "on_save",
    "on_log",
    "on_end",
    "on_failure",
    "state_dict",
)


def hooks_of(callback: Callback) -> frozenset[str]:
    """The methods that a callback has of its own."""
    return frozenset(
        name
        for name in HOOKS
        if getattr(type(callback), name) is not getattr(Callback, name) or name in vars(callback)
    )


def all_hooks(callbacks: Iterable[Callback]) -> frozenset[str]:
    return frozenset(name for callback in callbacks for name in hooks_of(callback))
