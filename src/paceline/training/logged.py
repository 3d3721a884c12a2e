"""Figures of a step beside its loss, over the samples of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.errors import PlanRefused
from paceline.launch.collectives.values import names_of_all
from paceline.training.loss import LossSum, read_tally, refuse_name, without_total

if TYPE_CHECKING:
    from paceline.strategies.step_sync import StepFigures
    from paceline.training.rank_state import RankState

Tallies = dict[str, list[LossSum]]  # figures by name


class LoggedFigures:
    """The figures that a job's `compute` returns beside the loss, or that its own step logs.

    Their sums and counts travel with the figures that end the step. A rank need not log what others
    do: a rank of an earlier stage computes no loss. So ranks agree on the names, once for each.
    """

    def __init__(self, state: RankState) -> None:
        self.state = state
        self.here: Tallies = {}  # that no other rank has for the same samples, and not sent yet
        self.sums: dict[str, tuple[float, float]] = {}  # sum and count of all ranks

    def add(
        self, name: str, value: Any, *, source: str, samples: int, whole: int, in_loss: bool = True
    ) -> None:
        """Log a figure of some samples of this rank.

        Args:
            source: Who gives it, in words.
            whole: All samples of the step.
            in_loss: Whether only ranks that compute a loss have it.

        Raises:
            TrainingError: the name is taken, or the value is no figure.
            PlanRefused: the plan's ranks don't add figures up.
        """
        refuse_name(name, source)
        state = self.state
        if state.logs_nothing:
            raise PlanRefused(
                f"{source}: {state.logs_nothing}",
                hint="data=N and shard=N plans add figures up; or leave the figure out",
            )
        mesh = state.mesh
        counts = mesh.is_first_of_same_loss if in_loss else mesh.is_first_of_same_samples
        note(self.here if counts else {}, name, value, source=source, samples=samples, whole=whole)

    @property
    def new_names(self) -> list[str]:
        """The names that other ranks may not know."""
        return [name for name in self.here if name not in self.state.logged_names]

    def message(self, names: Sequence[str]) -> torch.Tensor:
        """Return this rank's sum and count of each name, on the device."""
        return torch.cat([summed(self.here.get(name, ()), self.state.device) for name in names])

    def take(self, figures: StepFigures) -> None:
        """Take what all ranks logged from the end of a message. Collective if there are new names."""
        names = list(self.state.logged_names)
        sent = len(figures.users) - 2 * len(names)
        values, figures.users = list(figures.users[sent:]), figures.users[:sent]
        if figures.unnamed:
            sync = self.state.step_sync
            new = self.new_names
            if sync.world_size > 1:
                new = names_of_all(new, device=self.state.device)
            sums = sync.all_reduce_figures(self.message(new))
            names, values = [*names, *new], [*values, *sums.tolist()]
            self.state.logged_names = tuple(names)
        for name, total, count in zip(names, values[::2], values[1::2], strict=True):
            before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = before[0] + total, before[1] + count
        self.here = {}


def note(tallies: Tallies, name: str, value: Any, *, source: str, samples: int, whole: int) -> None:
    """Add the figure of some samples to others of its name. Of no samples, it counts nothing.

    Raises:
        TrainingError: the value is no figure.
    """
    value = without_total(value, samples=samples or 1, whole=whole)
    tally = read_tally(value, samples=samples or 1, name=source)
    kept = LossSum(tally.total, tally.count, is_mean=False)  # without the graph of its value
    tallies.setdefault(name, []).extend([kept] if samples else [])


def summed(tallies: Sequence[LossSum], device: torch.device) -> torch.Tensor:
    """Return the sum and the count of them all, on the device. The host doesn't wait for it."""
    figures = torch.zeros(2, dtype=torch.float64, device=device)
    for tally in tallies:
        figures[0] += tally.total
        figures[1] += tally.count
    return figures


def means(sums: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Return figures from their sums and counts: None for what is no finite number. One that nothing
    counts in is left out.
    """
    quotients = {name: total / count for name, (total, count) in sums.items() if count}
    return {name: mean if math.isfinite(mean) else None for name, mean in quotients.items()}
