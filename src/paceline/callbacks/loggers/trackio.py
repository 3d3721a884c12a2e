"""The trackio logger: a run of a project, in a database on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.callbacks.loggers.logger import Logger, Status
from paceline.job.callback import RunHandle

if TYPE_CHECKING:
    from PIL.Image import Image


class Trackio(Logger):
    """Logs to trackio.

    where: the project, "paceline" by default.
    """

    kind = "trackio"

    def begin(self, run: RunHandle, facts: Mapping[str, Any]) -> None:
        import trackio

        self.run_id = self.run_id or run.folder.name
        self.client: Any = trackio.init(
            project=self.where or "paceline", name=self.run_id, config=dict(facts), resume="allow"
        )

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        self.client.log(dict(figures), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self.client.log({name: text}, step=step)

    def image(self, step: int, name: str, image: Image) -> None:
        import trackio

        self.client.log({name: trackio.Image(image)}, step=step)

    def finish(self, status: Status) -> None:
        self.client.finish()
