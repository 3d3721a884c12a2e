"""The behaviour that all loggers share: which figures they log, and that a resumed run is one run
without duplicate points.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from paceline.base.errors import Preempted
from paceline.job.callback import Callback, EvaluationReport, StepReport
from paceline.runs.folder import LOGGERS

if TYPE_CHECKING:
    from PIL.Image import Image

    from paceline.job.callback import RunHandle

Status = Literal["finished", "failed", "interrupted"]
_OF_STEPS = ("loss", "lr", "gradient_norm", "loss_scale", "step_s")


class Logger(Callback, ABC):
    """Logs a run by the client of a service. Each kind of logger implements the methods after
    `failed`.
    """

    kind = ""

    def __init__(self, where: str | None = None) -> None:
        self.where = where  # a folder, an address or a project, depending on the kind
        # The client's name for the run. A resumed run continues with it.
        self.run_id: str | None = None
        self._is_open = False
        self._logged: dict[str, int] = {}  # the last logged step of each sort of figures

    def on_start(self, run: RunHandle) -> None:
        if self._is_open:  # ranks were started again
            return
        path = run.folder / LOGGERS
        noted = (
            json.loads(path.read_text()).get(self.kind, {}) if run.step and path.exists() else {}
        )
        self.run_id, self._logged = noted.get("run_id"), noted.get("logged", {})
        self.begin(
            run,
            {
                "plan": run.plan,
                "batch": run.job.batch,
                "seed": run.job.seed,
                "precision": run.job.precision,
            },
        )
        self._is_open = True
        self._note(run)

    def on_step(self, run: RunHandle, step: StepReport) -> None:
        figures = {
            name: step.figures[name] for name in _OF_STEPS if step.figures.get(name) is not None
        }
        if self._is_new("step", step.step):
            self.scalars(step.step, {**figures, "epoch": step.epoch})

    def on_figures(self, run: RunHandle, step: int, figures: Mapping[str, float | None]) -> None:
        if self._is_new("figures", step):
            self.scalars(
                step,
                {f"train_{name}": value for name, value in figures.items() if value is not None},
            )

    def on_evaluation(self, run: RunHandle, evaluation: EvaluationReport) -> None:
        if self._is_new("evaluation", evaluation.step):
            self.scalars(evaluation.step, evaluation.figures)
        self.flush()
        self._note(run)

    def on_log(self, run: RunHandle, step: int, values: Mapping[str, Any]) -> None:
        self.scalars(
            step,
            {
                name: float(value)
                for name, value in values.items()
                if isinstance(value, int | float)
            },
        )
        for name, value in values.items():
            if isinstance(value, str):
                self.text(step, name, value)
            elif not isinstance(value, int | float):
                self.image(step, name, value)

    def on_end(self, run: RunHandle, result: Any) -> None:
        self._close(run, "finished")

    def on_failure(self, run: RunHandle, error: BaseException) -> None:
        from paceline.launch.process.failure import RankFailed

        is_stop = isinstance(error, Preempted) or (
            isinstance(error, RankFailed) and error.failure.is_stop
        )
        self._close(run, "interrupted" if is_stop else "failed")

    def _close(self, run: RunHandle, status: Status) -> None:
        if self._is_open:
            self._is_open = False
            self.flush()
            self._note(run)
            self.finish(status)

    def _is_new(self, sort: str, step: int) -> bool:
        """Whether figures of this sort were not yet logged for the step."""
        if step <= self._logged.get(sort, 0):
            return False
        self._logged[sort] = step
        return True

    def _note(self, run: RunHandle) -> None:
        """Save in the run folder what a resumed run needs to continue logging."""
        from paceline.base.files import write_json

        path = run.folder / LOGGERS
        document = json.loads(path.read_text()) if path.exists() else {}
        write_json(path, {**document, self.kind: {"run_id": self.run_id, "logged": self._logged}})

    def check(self) -> None:
        """Check, before anything starts, that the run can be logged there, as far as that takes no
        time.

        Raises:
            UsageError: the run can't be logged there.
        """

    # --- By kind ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, run: RunHandle, facts: Mapping[str, Any]) -> None:
        """Open the client's run. It is `run_id` if there is one, otherwise a new run, whose name
        becomes `run_id`.
        """

    @abstractmethod
    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        """Log figures of a step by their names. Later steps may have been logged before."""

    @abstractmethod
    def text(self, step: int, name: str, text: str) -> None:
        """Log a text of a step."""

    @abstractmethod
    def image(self, step: int, name: str, image: Image) -> None:
        """Log an image of a step."""

    def flush(self) -> None:
        """Send the figures that are kept back."""

    @abstractmethod
    def finish(self, status: Status) -> None:
        """Close the client's run."""
