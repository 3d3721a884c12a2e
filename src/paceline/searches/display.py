"""The display of a running search: a line for each new best and each new kind of failure, and one on how far
the search is, which is live on a terminal.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from paceline.searches.controller import cause_of
from paceline.searches.trials import best_trial, counted, state_of

if TYPE_CHECKING:
    from paceline.searches.controller import Controller

PLAIN_EVERY_S = 30.0
_LIVE_EVERY_S = 0.25


class StudyDisplay:
    """Shows a search on stderr."""

    def __init__(self) -> None:
        self.live: Any = None
        self.began_s = self.shown_s = time.monotonic()
        self.done_before: int | None = None
        self.best: int | None = None
        self.num_seen = 0
        self.shown_causes: set[str] = set()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self.console = Console(file=sys.stderr)
            self.live = Live("", console=self.console, refresh_per_second=4, transient=True)
            self.live.start()

    def update(self, controller: Controller) -> None:
        """Show what has changed."""
        if self.done_before is None:
            self.done_before = controller.num_done
        if controller.num_done != self.num_seen:
            self.num_seen = controller.num_done
            self._tell_news(controller)
        now_s = time.monotonic()
        if now_s - self.shown_s < (PLAIN_EVERY_S if self.live is None else _LIVE_EVERY_S):
            return
        self.shown_s = now_s
        if self.live is None:
            self._say(self._line(controller))
        else:
            self.live.update(self._line(controller))

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def _tell_news(self, controller: Controller) -> None:
        best = best_trial(controller.study)
        if best is not None and best.number != self.best:
            self.best = best.number
            values = ", ".join(
                f"{each.name} {value:.5g}"
                for each, value in zip(controller.request.objectives, best.values, strict=True)
            )
            self._say(f"trial {best.number}: best so far, {values}  {settings(best.params)}")
        for reason in controller.failures.values():
            if (cause := cause_of(reason)) not in self.shown_causes:
                self.shown_causes.add(cause)
                self._say(f"a trial failed: {reason}")

    def _line(self, controller: Controller) -> str:
        states = [state_of(trial) for trial in counted(controller.study)]
        shown = ", ".join(
            f"{states.count(state)} {state}"
            for state in ("complete", "pruned", "refused", "failed", "running")
            if state in states
        )
        return f"{controller.num_done} of {controller.request.num_trials} trials: {shown}{self._left(controller)}"

    def _left(self, controller: Controller) -> str:
        done = controller.num_done - (self.done_before or 0)
        if not done:
            return ""
        left_s = (
            (time.monotonic() - self.began_s)
            / done
            * max(0, controller.request.num_trials - controller.num_done)
        )
        minutes, seconds = divmod(round(left_s), 60)
        return f", {minutes}:{seconds:02} left"

    def _say(self, text: str) -> None:
        if self.live is not None:
            self.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


def settings(params: Any) -> str:
    """Return settings as text for people.

    >>> settings({"lr": 0.0123456, "act": "relu"})
    'lr=0.01235 act=relu'
    """
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in params.items()
    )
