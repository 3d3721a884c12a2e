"""The Weights & Biases logger: a run of a project."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from paceline.callbacks.images import Image
from paceline.callbacks.loggers.logger import Logger, Status
from paceline.job.callback import RunHandle


class WeightsAndBiases(Logger):
    """Logs to Weights & Biases. WANDB_MODE=offline keeps the run in the run folder.

    where: the project, "paceline" by default.
    """

    kind = "wandb"

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

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        self.client.log(dict(figures), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        import wandb

        self.client.log({name: wandb.Html(f"<pre>{text}</pre>")}, step=step)

    def image(self, step: int, name: str, image: Image) -> None:
        import PIL.Image
        import wandb

        self.client.log({name: wandb.Image(PIL.Image.open(io.BytesIO(image.data)))}, step=step)

    def finish(self, status: Status) -> None:
        self.client.finish(exit_code=0 if status == "finished" else 1)
