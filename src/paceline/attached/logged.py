"""Figures that a script logs, joined over ranks where these are together anyway."""

from __future__ import annotations

import json
from typing import Any

from paceline.training.logged import Tallies, means, note, summed
from paceline.training.run import RunPart, TrainingRun

_EVERY = 100  # steps after which ranks join figures at the latest


class Logged(RunPart):
    """Keeps figures on each rank, and lets rank 0 write those of all ranks.

    A figure costs no collective, and the host doesn't wait for the device when one is logged.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self._tallies: dict[int, Tallies] = {}  # by step, from 1
        self._joined_step = 0

    def add(self, figures: dict[str, Any], *, rows: int, whole: int) -> None:
        """Keep figures of the step that is being taken. whole: the rows of all ranks."""
        of_step = self._tallies.setdefault(self.run.step + 1, {})
        for name, value in figures.items():
            note(of_step, name, value, source=f"run.log({name}=...)", samples=rows, whole=whole)

    def settled(self) -> None:
        step = self.run.step
        is_early = step.bit_count() == 1  # 1, 2, 4, ...: a short run shows figures, too
        if self.run.context.world_size == 1 or is_early or step % _EVERY == 0:
            self.join()

    def saving(self) -> None:
        self.join()

    def finished(self) -> None:
        self.join()

    def join(self) -> None:
        """Write the figures of all ranks until now. All ranks come here after the same step."""
        context, tallies = self.run.context, self._tallies
        if self._joined_step == self.run.step:
            return
        self._tallies, self._joined_step = {}, self.run.step
        own = {
            str(step): {
                name: summed(each, self.run.stepper.device).tolist()
                for name, each in figures.items()
            }
            for step, figures in tallies.items()
        }
        key = f"logged/{context.num_trained}/{self.run.step}"
        if context.rank:
            assert context.store is not None
            context.store.set(f"{key}/{context.rank}", json.dumps(own))
            return
        every = [own]
        for rank in range(1, context.world_size):
            every.append(json.loads(context.hear(f"{key}/{rank}", "save")))
            assert context.store is not None
            context.store.delete_key(f"{key}/{rank}")
        for step in sorted({int(step) for of_rank in every for step in of_rank}):
            of_step = [of_rank.get(str(step), {}) for of_rank in every]
            names = dict.fromkeys(name for figures in of_step for name in figures)
            sums = {
                name: [sum(f[name][place] for f in of_step if name in f) for place in (0, 1)]
                for name in names
            }
            logged, log = means(sums), self.run.log
            log.note(step, logged=logged)
            # Of the loss, the progress line has that of the latest step.
            log.figures = {k: v for k, v in {**log.figures, **logged}.items() if k != "loss"}
