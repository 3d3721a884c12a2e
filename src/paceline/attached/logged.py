"""Figures that a script logs, joined over ranks where these are together anyway."""

from __future__ import annotations

from itertools import chain
from typing import Any

from paceline.launch.collectives.values import values_of_all
from paceline.training.logged import Tallies, means, note, summed
from paceline.training.run import RunPart, TrainingRun

_EVERY = 100  # steps after which ranks join figures at the latest


class Logged(RunPart):
    """Keeps figures on each rank, and lets rank 0 write those of all ranks.

    Ranks join them now and then: a figure costs no collective of its own, and the host doesn't wait for the device
    when one is logged.
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

    def join(self) -> None:
        """Write the figures of all ranks until now. Collective."""
        context, device, tallies = self.run.context, self.run.stepper.device, self._tallies
        if self._joined_step == self.run.step:
            return
        self._tallies, self._joined_step = {}, self.run.step
        own = [
            (step, name, summed(each, device).tolist())
            for step, figures in tallies.items()
            for name, each in figures.items()
        ]
        every = values_of_all(own, device=device) if context.world_size > 1 else [own]
        if context.rank:
            return
        sums: dict[int, dict[str, tuple[float, float]]] = {}
        for step, name, (total, count) in chain(*every):
            of_step = sums.setdefault(step, {})
            before = of_step.get(name, (0.0, 0.0))
            of_step[name] = before[0] + total, before[1] + count
        for step in sorted(sums):
            logged, log = means(sums[step]), self.run.log
            log.note(step, logged=logged)
            # Of the loss, the progress line has that of the latest step.
            log.figures = {k: v for k, v in {**log.figures, **logged}.items() if k != "loss"}

    saving = finished = join
