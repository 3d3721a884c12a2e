"""Shows progress on rank 0: a live line on a terminal, otherwise plain lines.

There is a plain line for the first step and for the last one. Between them, lines come after 1 s,
another 2 s, another 4 s and so on, and finally every 30 s.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.base.logs import Tee, logger
from paceline.base.tables import in_mib, in_ms, three_digits

FIRST_PLAIN_S, PLAIN_EVERY_S, LIVE_EVERY_S = 1.0, 30.0, 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """The figures that are known after a step."""

    step: int
    total_steps: int | None
    epoch: int
    loss: float
    samples_per_s: float
    step_s: float
    memory_bytes: int
    predicted_step_s: float | None
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # the latest of each

    @property
    def left_s(self) -> float | None:
        return None if self.total_steps is None else (self.total_steps - self.step) * self.step_s

    def __str__(self) -> str:
        total = f"/{self.total_steps}" if self.total_steps else ""
        predicted = f" (predicted {in_ms(self.predicted_step_s)})" if self.predicted_step_s else ""
        left = f", {_duration(self.left_s)} left" if self.left_s is not None else ""
        metrics = "".join(
            f"{name} {value:.4g}  " for name, value in self.metrics.items() if value is not None
        )
        return (
            f"step {self.step}{total}  epoch {self.epoch + 1}  loss {self.loss:.4f}  {metrics}"
            f"{three_digits(self.samples_per_s)} samples/s  {in_ms(self.step_s)}/step{predicted}  "
            f"{in_mib(self.memory_bytes)}{left}"
        )


def _duration(value_s: float) -> str:
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


class Display:
    """Shows progress on rank 0, and nothing on the other ranks."""

    def __init__(self, *, shown: bool) -> None:
        self.shown = shown
        self.output: Any = sys.stderr
        self.is_live = shown and isinstance(self.output, Tee) and self.output.isatty()
        self.live: Any = None  # the line, once there is something to show
        self.last_s = -math.inf
        self.pause_s = FIRST_PLAIN_S / 2

    def _go_live(self) -> None:
        from rich.console import Console
        from rich.file_proxy import FileProxy
        from rich.live import Live

        self.terminal = self.output.terminal
        console = Console(file=self.terminal)
        self.live = Live(
            "",
            console=console,
            refresh_per_second=8,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.live.start()
        self.output.terminal = FileProxy(
            console, self.terminal
        )  # other output is printed above the line

    @property
    def is_plain(self) -> bool:
        """Whether lines are shown, but no live line."""
        return self.shown and not self.is_live

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if self.shown:
            logger.info(text)

    def due(self) -> bool:
        """Whether `update` would show something now. The plain form shows nothing most of the time."""
        now_s = time.monotonic()
        if not self.shown or now_s - self.last_s < (LIVE_EVERY_S if self.is_live else self.pause_s):
            return False
        self.last_s, self.pause_s = now_s, min(2 * self.pause_s, PLAIN_EVERY_S)
        return True

    def update(self, progress: Progress) -> None:
        if self.is_live:
            from rich.text import Text

            if self.live is None:
                self._go_live()
            self.live.update(Text(str(progress), no_wrap=True, overflow="ellipsis"))
        else:
            logger.info(str(progress))

    def close(self) -> None:
        if self.live:
            self.output.flush()
            self.output.terminal = self.terminal
            self.live.stop()
            self.live = None
