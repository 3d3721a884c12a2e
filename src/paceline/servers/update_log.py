"""Figures of each update and step of a run with servers, in metrics.jsonl and the journal."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from paceline.job.order import split
from paceline.servers.history import History
from paceline.servers.membership import staleness_of, updates_after
from paceline.servers.update_order import UpdateOrder
from paceline.training.run import RankRun, RunPart


@dataclass
class _Step:
    """What is known of a step of which some updates are made and others are not."""

    missing: int
    loss: float = 0.0
    count: float = 0.0


class UpdateLog(RunPart):
    """Writes updates down as they are made, and counts the steps that they complete.

    began_s: when the step that is completed next began.
    """

    def __init__(self, run: RankRun, turns: UpdateOrder) -> None:
        self.run, self.turns = run, turns
        self.begun: dict[int, _Step] = {}
        self.staleness: Counter[int] = Counter()
        self.began_s = 0.0
        self._metrics_bytes: int | None = None  # of the file at the copy that the run goes on from

    def figures(self) -> Mapping[str, Any]:
        metrics = self.run.log.metrics
        return {
            "begun": [(step, *astuple(begun)) for step, begun in self.begun.items()],
            "metrics_bytes": metrics.stat().st_size if metrics is not None else 0,
        }

    def take_figures(self, figures: Mapping[str, Any]) -> None:
        self.begun = {step: _Step(*values) for step, *values in figures["begun"]}
        self._metrics_bytes = figures["metrics_bytes"]

    def summary(self) -> Mapping[str, Any]:
        return {"staleness": {str(stale): num for stale, num in sorted(self.staleness.items())}}

    def go_on(self, history: History) -> int:
        """Begin the journal after these updates. Returns how many were recorded after them, which are made again."""
        run, metrics, num_again = self.run, self.run.log.metrics, 0
        if metrics is not None and run.settings.resume:
            if self._metrics_bytes is None:
                num_again = updates_after(metrics, run.step)
                run.log.go_on(run.step)
            else:
                num_again = updates_after(metrics, -1, offset=self._metrics_bytes)
                os.truncate(metrics, min(self._metrics_bytes, metrics.stat().st_size))
            self.staleness.update(staleness_of(metrics))
        after = self.turns.steps(history.first)
        places = [
            self.turns.place(turn)
            for turn in (*range(self.turns.before(after), history.first), *sorted(history.later))
        ]
        run.log.journal.begin(
            run.job,
            plan=str(run.plan),
            world_size=run.context.world_size,
            after=after,
            also=[(step + 1, part) for step, part in places],
        )
        self.began_s = time.monotonic()
        return num_again

    def add(
        self, turn: int, *, loss: float, count: float, digest: int, norm: float, stale: int
    ) -> None:
        """The update of a turn was made. The line of the one that completes a step has the step's figures."""
        run, log, turns = self.run, self.run.log, self.turns
        step, part = turns.place(turn)
        window = turns.order.window(step)
        figures: dict[str, Any] = {} if run.job.clip is None else {"gradient_norm": norm}
        if turns.is_stale:
            figures["staleness"] = stale
            own = split(window.count, run.settings.shares)[part]
            samples = replace(window, start=window.start + own.start, count=len(own))
            log.journal.note(step + 1, samples, part=part)
        else:
            log.journal.note(step + 1, window)
        log.journal.settle(digest)
        self.staleness[stale] += 1
        begun = self.begun.setdefault(step, _Step(turns.before(step + 1) - turns.before(step)))
        begun.missing -= 1
        begun.loss += loss
        begun.count += count
        if begun.missing:
            log.note(run.step + 1, **figures)
            return
        del self.begun[step]
        run.count(window)
        now_s = time.monotonic()
        step_s, self.began_s = now_s - self.began_s, now_s
        log.speed.add(window.count, step_s)
        log.loss = begun.loss / begun.count
        log.note(**run.step_figures(window, step_s), loss=log.loss, **figures)
        run.tell("counted")
        log.show(run.step, run.job.total_steps, window.epoch)
