"""What a callback holds of its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError
from paceline.runtime.control import Requests
from paceline.runtime.documents import metrics_kind, read_lines
from paceline.runtime.folder import METRICS

if TYPE_CHECKING:
    import torch

    from paceline.job import Job


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
    _requests: Requests = field(default_factory=Requests, repr=False)
    _weights: Callable[[], dict[str, torch.Tensor]] | None = field(default=None, repr=False)
    _log: Callable[[Mapping[str, Any]], None] | None = field(default=None, repr=False)

    @property
    def history(self) -> list[dict[str, Any]]:
        """All that `metrics.jsonl` says until now, a mapping a line; read anew each time."""
        return read_history(self.folder)

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
            raise UsageError("the job has no validation data to evaluate on", hint="give the Job validation=")
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
            raise UsageError("run.state_dict() was asked for while the ranks go on",
                             hint="on_evaluation, on_epoch, on_save, on_start and on_end are called while they wait")
        return self._weights()

    def log(self, values: Mapping[str, Any]) -> None:
        """Give numbers, text and images by name to whatever logs the run, and numbers and text to `logged.jsonl`.

        An image is an array or tensor of shape (height, width), (height, width, channels) or (channels, height,
        width), or a figure of matplotlib.
        """
        if self._log is not None:
            self._log(values)


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; none where there is no such file.

    Raises:
        UsageError: the file can't be read.
    """
    return list(read_lines(run_dir / METRICS, metrics_kind))
