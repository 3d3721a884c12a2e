"""The TensorBoard logger: event files, in the run folder by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.callbacks.loggers.logger import Logger, Status
from paceline.job.callback import RunHandle

if TYPE_CHECKING:
    from PIL.Image import Image


class TensorBoard(Logger):
    """Logs to TensorBoard.

    where: the folder of the event files, or its address, such as gs://BUCKET/NAME.
    """

    kind = "tensorboard"

    def begin(self, run: RunHandle, facts: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.run_id = self.where or str(run.folder / "tensorboard")
        self.writer: Any = SummaryWriter(self.run_id)
        self.writer.add_text(
            "run", "\n".join(f"    {name}: {value}" for name, value in facts.items())
        )

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self.writer.add_text(name, text, step)

    def image(self, step: int, name: str, image: Image) -> None:
        import numpy as np

        pixels = np.asarray(image)
        self.writer.add_image(name, pixels, step, dataformats="HWC"[: pixels.ndim])

    def flush(self) -> None:
        self.writer.flush()

    def finish(self, status: Status) -> None:
        self.writer.close()
