"""The Weights & Biases logger: a run of a project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.callbacks.loggers.logger import Logger, Status
from paceline.job.callback import RunHandle

if TYPE_CHECKING:
    from PIL.Image import Image

_ROWS = 1000  # of the client between two steps: it takes no row before the last one


class WeightsAndBiases(Logger):
    """Logs to Weights & Biases. WANDB_MODE=offline keeps the run in the run folder.

    where: the project, "paceline" by default.
    """

    kind = "wandb"
    _row = 0  # the client's number of the last row

    def begin(self, run: RunHandle, facts: Mapping[str, Any]) -> None:
        import wandb

        self.client: Any = wandb.init(
            project=self.where or "paceline",
            name=run.folder.name,
            dir=str(run.folder),
            id=self.run_id,
            resume="allow",
            config=dict(facts),
        )
        self.run_id = self.client.id
        self.client.define_metric("*", step_metric="step")

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        self._send(step, figures)

    def text(self, step: int, name: str, text: str) -> None:
        import wandb

        self._send(step, {name: wandb.Html(f"<pre>{text}</pre>")})

    def image(self, step: int, name: str, image: Image) -> None:
        import wandb

        self._send(step, {name: wandb.Image(image)})

    def _send(self, step: int, values: Mapping[str, Any]) -> None:
        """Send values of a step. Those of a later step may have been sent, so each row has its step."""
        row = _ROWS * step
        self._row = row if row >= self._row else self._row + 1
        self.client.log({**values, "step": step}, step=self._row)

    def finish(self, status: Status) -> None:
        self.client.finish(exit_code=0 if status == "finished" else 1)
