"""Figures that a job's own step logs, over the samples of all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.base.errors import PlanRefused, TrainingError
from paceline.job.phases import FIGURES
from paceline.training.loss import read_tally, without_total

if TYPE_CHECKING:
    from paceline.strategies.step_sync import StepFigures
    from paceline.training.rank_state import RankState


class LoggedFigures:
    """The figures that a step logs.

    Their sums and counts travel with the figures that end the step. A rank need not log what others
    do: a rank of an earlier stage computes no loss. So ranks agree on the names, once for each.
    """

    def __init__(self, state: RankState) -> None:
        self.state = state
        # Sums and counts of this rank that are not sent yet.
        self.here: dict[str, list[tuple[torch.Tensor, torch.Tensor | float]]] = {}
        self.sums: dict[str, tuple[float, float]] = {}  # sum and count of all ranks

    def add(self, name: str, value: Any, *, samples: int, whole: int, counts: bool) -> None:
        """Log a figure of some samples of this rank.

        Args:
            whole: All samples of the step.
            counts: Whether no other rank logs it for the same samples.

        Raises:
            TrainingError: the name is taken, or the value is no figure.
            PlanRefused: replicas take steps of their own.
        """
        refuse_name(name)
        if self.state.step_sync.has_own_steps:
            raise PlanRefused(
                f"ctx.log('{name}'): under this plan replicas take steps of their own, and don't add up "
                "what they measure in each",
                hint="a data=N or shard=N plan; or leave the figure out",
            )
        value = without_total(value, samples=max(samples, 1), whole=whole)
        tally = read_tally(value, samples=max(samples, 1), name=f"ctx.log('{name}')")
        here = self.here.setdefault(name, [])
        if samples and counts:
            here.append((tally.total, tally.count))

    @property
    def new_names(self) -> list[str]:
        """The names that other ranks may not know. Of ranks that compute the same, one has them."""
        is_first = self.state.mesh.is_first_of_same_loss
        return [name for name in self.here if is_first and name not in self.state.logged_names]

    def message(self, names: Sequence[str]) -> torch.Tensor:
        """Return this rank's sum and count of each name, on the device."""
        device = self.state.device
        rows = [torch.zeros(2, dtype=torch.float64, device=device) for _ in names]
        for name, row in zip(names, rows, strict=True):
            for total, count in self.here.get(name, ()):
                row[0] += total
                row[1] += count
        return torch.cat(rows)

    def take(self, figures: StepFigures) -> None:
        """Take what all ranks logged from the end of a message. Collective if there are new names."""
        names = list(self.state.logged_names)
        sent = len(figures.users) - 2 * len(names)
        values, figures.users = list(figures.users[sent:]), figures.users[:sent]
        if figures.unnamed:
            new = self._new_names_of_all()
            sums = self.state.step_sync.all_reduce_figures(self.message(new))
            names, values = [*names, *new], [*values, *sums.tolist()]
            self.state.logged_names = tuple(names)
        for name, total, count in zip(names, values[::2], values[1::2], strict=True):
            before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = before[0] + total, before[1] + count
        self.here = {}

    def means(self) -> dict[str, float | None]:
        """Return the figures of all samples. One that nothing counts in is left out."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}

    def _new_names_of_all(self) -> list[str]:
        """Return the new names of all ranks, in one order. Collective."""
        here = json.dumps(self.new_names).encode() if self.new_names else b""
        longest = max(int(length) for (length,) in self._of_all([len(here)], 1))
        texts = [bytes(map(int, row)).rstrip(b"\0") for row in self._of_all(here, longest)]
        return sorted({name for text in texts if text for name in json.loads(text)})

    def _of_all(self, values: Sequence[int], longest: int) -> list[list[float]]:
        """Return the values of every rank, filled up with zeros. Collective."""
        sync, place = self.state.step_sync, self.state.loss_number
        table = torch.zeros(sync.world_size, longest, dtype=torch.float64)
        table[place, : len(values)] += torch.tensor(list(values), dtype=torch.float64)
        summed: list[list[float]] = (
            sync.all_reduce_figures(table.flatten().to(self.state.device)).view_as(table).tolist()
        )
        return summed


def refuse_name(name: Any) -> None:
    """Refuse a name that a logged figure can't have.

    Raises:
        TrainingError: it is no text, or the name of a figure of every run.
    """
    if not isinstance(name, str):
        raise TrainingError(f"ctx.log({name!r}, ...): the name of a figure is a text")
    if name in FIGURES:
        raise TrainingError(
            f"ctx.log('{name}', ...): every run has a figure of that name",
            hint="give the figure another name",
        )
