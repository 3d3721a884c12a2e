"""What a run writes down while it trains: metrics.jsonl, the journal, the display, and the figures of its summary."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.base.errors import CheckpointError
from paceline.base.files import write_text
from paceline.launch.process.memory_use import PeakMemory
from paceline.runs.documents import metrics_kind, read_lines
from paceline.runs.folder import JOURNAL, METRICS, PREDICTED
from paceline.runs.journal import Journal
from paceline.training.display import Display, Progress
from paceline.training.settings import Settings

WARM_UP_STEPS = 10  # of a launch, left out of its speed
REMEMBERED_STEPS = 1000  # whose times are kept


@dataclass
class Speed:
    """Time spent in steps after the warm-up, without evaluation and saving."""

    steps: int = 0
    warm_steps: int = 0
    warm_samples: int = 0
    warm_s: float = 0.0
    all_s: float = 0.0
    all_samples: int = 0
    input_s: float = 0.0
    # of the latest steps, each
    latest_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))

    def add(self, samples: int, step_s: float, *, input_s: float = 0.0) -> None:
        """Count a step. input_s: of step_s, until the samples were there."""
        self.steps += 1
        self.input_s += input_s
        self.latest_s.append(step_s)
        self.all_s, self.all_samples = self.all_s + step_s, self.all_samples + samples
        if self.steps > WARM_UP_STEPS:
            self.warm_steps += 1
            self.warm_s, self.warm_samples = self.warm_s + step_s, self.warm_samples + samples

    @property
    def samples_per_s(self) -> float:
        samples, spent_s = (
            (self.warm_samples, self.warm_s) if self.warm_steps else (self.all_samples, self.all_s)
        )
        return samples / spent_s if spent_s else 0.0

    @property
    def step_s(self) -> float:
        return self.warm_s / self.warm_steps if self.warm_steps else self.all_s / max(self.steps, 1)

    @property
    def later_step_s(self) -> float:
        """The mean of the later half of the latest steps."""
        later = list(self.latest_s)[len(self.latest_s) // 2 :]
        return statistics.fmean(later) if later else 0.0


class RunLog:
    """What one rank knows and writes of a run. Only the rank that `writes` has files, and only the one that `shows` a
    display."""

    def __init__(
        self, settings: Settings, device: torch.device, *, writes: bool, shows: bool
    ) -> None:
        self.settings, self.writes = settings, writes
        run_dir = settings.run_dir if writes else None
        self.metrics = run_dir / METRICS if run_dir is not None else None
        self.journal = Journal(run_dir / JOURNAL if run_dir is not None else None)
        self.display = Display(shown=shows)
        self.memory, self.speed = PeakMemory(device), Speed()
        self.loss = math.nan  # of the last step that has a finite one
        self.figures: Mapping[
            str, float | None
        ] = {}  # the latest that the job or the script has given
        self.evaluated: dict[str, float] = {}  # "validation_loss" and metrics, of the last time
        self.blocked_s = 0.0  # that the run waited for saves
        self.started_s = time.monotonic()

    def close(self) -> None:
        self.display.close()
        self.journal.close()

    def note(self, step: int, **figures: Any) -> None:
        """Append a line to metrics.jsonl.

        Raises:
            CheckpointError: the file can't be written, or its folder is not the run's any more.
        """
        if self.metrics is None:
            return
        assert self.journal.path is not None
        if not self.journal.path.exists():  # which is there before the first line
            raise CheckpointError(
                f"the run folder {self.metrics.parent} is gone: it was removed, renamed or "
                "unmounted meanwhile",
                hint="--run DIR --resume goes on from its last checkpoint, where it is now",
            )
        try:
            with open(self.metrics, "ab") as file:  # a text file takes four times as long
                line = json.dumps({"step": step, "time": time.time(), **figures})
                file.write(f"{line}\n".encode())
        except OSError as error:
            raise CheckpointError(
                f"can't write {self.metrics}: {error.strerror}",
                hint="--resume goes on from the last checkpoint when there is space again",
            ) from error

    def go_on(self, step: int) -> None:
        """Forget what was recorded after the step that this launch goes on from, and damaged lines."""
        if self.metrics is None:
            return
        if self.metrics.exists():
            kept = [row for row in read_lines(self.metrics, metrics_kind) if row["step"] <= step]
            write_text(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))
        self.loss = recorded_loss(self.metrics)  # there may be no step left

    def note_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Record an evaluation, show it, and tell whoever asked to be told. figures: "loss" and metrics."""
        metrics = {name: value for name, value in figures.items() if name != "loss"}
        self.evaluated = {"validation_loss": figures["loss"], **metrics}
        self.note(step, validation_loss=figures["loss"], metrics=metrics)
        self.display.say(
            f"step {step}: " + ", ".join(f"{k} {v:.4f}" for k, v in self.evaluated.items())
        )
        if self.settings.on_evaluation is not None and self.writes:
            self.settings.on_evaluation(step, self.evaluated)

    def show(self, step: int, total_steps: int | None, epoch: int) -> None:
        """Show how far the run is, if it is time, and after the last step."""
        if self.display.due() or (step == total_steps and self.display.is_plain):
            self.display.update(
                Progress(
                    step,
                    total_steps,
                    epoch,
                    self.loss,
                    self.speed.samples_per_s,
                    self.speed.step_s,
                    self.memory.bytes(),
                    predicted_step_s(self.settings.run_dir),
                    self.figures,
                )
            )

    def summary(self) -> dict[str, Any]:
        """Return the figures that every kind of run has in its summary."""
        return {
            "samples_per_s": self.speed.samples_per_s,
            "step_s": self.speed.step_s,
            "later_step_s": self.speed.later_step_s,
            "final_loss": self.loss if math.isfinite(self.loss) else None,
            "validation_loss": self.evaluated.get("validation_loss"),
            "metrics": {
                name: value for name, value in self.evaluated.items() if name != "validation_loss"
            },
            "wall_s": time.monotonic() - self.started_s,
            "save_blocked_s": self.blocked_s,
        }


def recorded_loss(path: Path) -> float:
    """Return the last finite loss that a run recorded of a step; NaN if there is none."""
    losses = [row["loss"] for row in read_lines(path, metrics_kind) if row.get("loss") is not None]
    return losses[-1] if losses else math.nan


def learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the rate of the first group; None if it has none."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def predicted_step_s(run_dir: Path | None) -> float | None:
    """Return what was predicted of a step, once it is known."""
    path = run_dir / PREDICTED if run_dir else None
    return json.loads(path.read_text())["step_s"] if path is not None and path.exists() else None
