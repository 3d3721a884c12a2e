"""When ranks agree on the figures of their steps, and whose samples a step's gradients are of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from paceline.strategies.compress.size import all_reduce_bytes
from paceline.strategies.host_all_reduce import all_reduce

STEP_FIGURES = 2  # of a step's figures the loss's sum and its count are its own; those after them may be added up


@dataclass(frozen=True, slots=True)
class SyncedFigures:
    """What all ranks know after they met, which is where a run may be saved.

    figures: summed over the ranks: (loss, count) of each step since the last meeting, float64.
    flags: summed over the ranks and those steps: whatever else a step had to say.
    weight: this replica's part of what those steps counted.
    """

    figures: list[list[float]]
    flags: list[float]
    weight: float


@runtime_checkable
class StepSync(Protocol):
    """Told of every step by all ranks alike.

    has_own_steps: whether a replica updates its weights with the gradient of its own samples alone, by an optimizer
        state of its own.
    world_size: ranks whose figures `all_reduce_figures` sums.
    met_bytes: what this rank has sent so far to agree on figures.
    """

    has_own_steps: bool
    world_size: int
    met_bytes: float

    def all_reduce_figures(self, figures: torch.Tensor) -> torch.Tensor:
        """The figures of all whose gradients an update is made of, summed. figures: loss, count, flags; float64."""

    def end_step(
        self,
        step: int,
        figures: torch.Tensor,
        host_figures: list[float],
        beat: Callable[[str], None],
    ) -> SyncedFigures | None:
        """The update of step `step` (counted from 1) is done; None if the ranks don't meet after it.

        figures: what was agreed. host_figures: the same, read already; to read them again is to wait for the update.
        """

    def finalize(self, step: int) -> SyncedFigures | None:
        """The run ends: on return all replicas hold the same. None if there was nothing left to meet for."""

    def drain(self) -> None:
        """Wait for what is under way, before ranks meet for something else."""

    def global_weights(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The weights that all replicas hold alike, which are the run's; in the place of those that a rank works on."""

    def global_weights_in_place(self) -> AbstractContextManager[None]:
        """Meanwhile the model computes with the shared weights."""


class SyncEveryStep:
    """All ranks meet in every step."""

    has_own_steps = False

    def __init__(self, world_size: int) -> None:
        self.world_size, self.met_bytes = world_size, 0.0

    def all_reduce_figures(self, figures: torch.Tensor) -> torch.Tensor:
        if self.world_size > 1:
            all_reduce(figures)
            self.met_bytes += all_reduce_bytes(figures.nbytes, self.world_size)
        return figures

    def end_step(
        self,
        step: int,
        figures: torch.Tensor,
        host_figures: list[float],
        beat: Callable[[str], None],
    ) -> SyncedFigures | None:
        return SyncedFigures([host_figures[:STEP_FIGURES]], host_figures[STEP_FIGURES:], 1.0)

    def finalize(self, step: int) -> SyncedFigures | None:
        return None

    def drain(self) -> None:
        """Nothing is under way between steps."""

    def global_weights(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return weights

    def global_weights_in_place(self) -> AbstractContextManager[None]:
        return nullcontext()
