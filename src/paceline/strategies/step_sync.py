"""Step synchronisation: when ranks agree on the figures of their steps, and which weights count as
the run's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from paceline.strategies.compress.size import all_reduce_bytes
from paceline.strategies.host_all_reduce import all_reduce

# The first figures of a step are the sum of its loss and the count, which are kept by step. Later
# ones may be added up.
STEP_FIGURES = 2


@dataclass(frozen=True, slots=True)
class SyncedFigures:
    """The figures that all ranks know after they met. A run may be saved at this moment."""

    # (loss, count) of each step since the last meeting, summed over the ranks, float64.
    figures: list[list[float]]
    flags: list[float]  # all other figures, summed over the ranks and over those steps
    weight: float  # this replica's part of the count of those steps


@runtime_checkable
class StepSync(Protocol):
    """Synchronises the figures of steps. All ranks call it in the same way in every step."""

    # Whether a replica updates its weights with the gradient of its own samples alone, and with its
    # own optimizer state.
    has_own_steps: bool
    world_size: int  # number of ranks whose figures `all_reduce_figures` sums
    met_bytes: float  # bytes that this rank has sent so far to agree on figures

    def all_reduce_figures(self, figures: torch.Tensor) -> torch.Tensor:
        """Sum the figures of all ranks whose gradients are part of an update.

        figures: loss, count, flags; float64.
        """

    def end_step(
        self,
        step: int,
        figures: torch.Tensor,
        host_figures: list[float],
        beat: Callable[[str], None],
    ) -> SyncedFigures | None:
        """End step `step` (counted from 1) after its update.

        Args:
            figures: The figures that were agreed on.
            host_figures: The same, already read to the host. Reading `figures` again would wait for
                the update.
            beat: Reports a phase of the step, for the heartbeat.

        Returns:
            The synchronised figures; None if the ranks don't meet after this step.
        """

    def finalize(self, step: int) -> SyncedFigures | None:
        """End the run.

        On return, all replicas hold the same weights. Returns None if no meeting was left.
        """

    def drain(self) -> None:
        """Wait for pending communication, before ranks communicate for another purpose."""

    def global_weights(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the weights that all replicas share, in place of those that this rank trains.

        The shared weights count as the run's.
        """

    def global_weights_in_place(self) -> AbstractContextManager[None]:
        """Let the model compute with the shared weights while the context is entered."""


class SyncEveryStep:
    """The step synchronisation of plans whose ranks all meet in every step."""

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
        """Do nothing: no communication is pending between steps."""

    def global_weights(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return weights

    def global_weights_in_place(self) -> AbstractContextManager[None]:
        return nullcontext()
