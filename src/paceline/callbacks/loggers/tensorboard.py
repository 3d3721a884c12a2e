"""The TensorBoard logger: event files, in the run folder by default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.callbacks.images import Image
from paceline.callbacks.loggers.logger import Logger, Status
from paceline.job.callback import RunHandle


class TensorBoard(Logger):
    """Logs to TensorBoard.

    where: the folder of the event files.
    """

    kind = "tensorboard"

    def begin(self, run: RunHandle, facts: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.run_id = str(Path(self.where) if self.where else run.folder / "tensorboard")
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
        from tensorboard.compat.proto.summary_pb2 import Summary

        picture = Summary.Image(
            height=image.height,
            width=image.width,
            colorspace=image.channels,
            encoded_image_string=image.data,
        )
        self.writer._get_file_writer().add_summary(
            Summary(value=[Summary.Value(tag=name, image=picture)]), step
        )

    def flush(self) -> None:
        self.writer.flush()

    def finish(self, status: Status) -> None:
        self.writer.close()
