"""Step synchronisation: when ranks agree on the figures of their steps, and which weights count as
the run's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from paceline.strategies.compress.size import all_reduce_bytes


@dataclass(slots=True)
class StepFigures:
    """The figures of a loss that went back, or of a step. Ranks send them as float64 and add them up."""

    loss: float = 0.0  # the sum over the samples
    count: float = 0.0  # over which it is summed
    ends: float = 0.0  # ranks for which these are the last figures before the step's update
    stops: float = 0.0  # ranks that were asked to stop
    sums: float = 0.0  # micro-batches whose loss is a sum, and no mean
    changed: float = 0.0  # ranks whose forwards changed state that is not synchronised yet
    edited: float = 0.0  # ranks whose forwards changed a parameter
    unknown: float = 0.0  # ranks whose forwards changed a parameter that is not known yet
    unnamed: float = 0.0  # names of logged figures that not all ranks know
    overflows: float = 0.0  # above 0 if a gradient overflowed under loss scaling
    digest: float = 0.0  # of the samples; see `order.digest`
    users: tuple[float, ...] = ()  # how many ranks used each parameter

    @classmethod
    def read(cls, values: Sequence[float]) -> StepFigures:
        """Return the figures from `values`."""
        known = len(cls.__slots__) - 1
        fields: list[Any] = [*values[:known], tuple(values[known:])]
        return cls(*fields)

    @property
    def values(self) -> list[float]:
        """The figures as numbers, in the order of the fields."""
        return [*_NUMBERS(self), *self.users]


_NUMBERS = attrgetter(*StepFigures.__slots__[:-1])


@dataclass(frozen=True, slots=True)
class SyncedFigures:
    """The figures that all ranks know after they met. A run may be saved at this moment."""

    # (loss, count) of each step since the last meeting, summed over the ranks.
    losses: list[tuple[float, float]]
    flags: StepFigures  # summed over the ranks and over those steps
    weight: float  # this replica's part of the count of those steps


@runtime_checkable
class StepSync(Protocol):
    """Synchronises the figures of steps. All ranks call it in the same way in every step.

    What a class that inherits from it leaves out is that of ranks that all meet in every step.
    """

    # Whether a replica updates its weights with the gradient of its own samples alone, and with its
    # own optimizer state.
    has_own_steps: bool = False
    world_size: int  # number of ranks whose figures `all_reduce_figures` sums
    met_bytes: float = 0.0  # bytes that this rank has sent so far to agree on figures

    def all_reduce_figures(self, figures: torch.Tensor) -> torch.Tensor:
        """Sum the figures of all ranks whose gradients are part of an update.

        figures: loss, count, flags; float64.
        """
        if self.world_size > 1:
            dist.all_reduce(figures)
            self.met_bytes += all_reduce_bytes(figures.nbytes, self.world_size)
        return figures

    def end_step(
        self, step: int, figures: StepFigures, beat: Callable[[str], None]
    ) -> SyncedFigures | None:
        """End step `step` (counted from 1) after its update.

        Args:
            figures: The figures that were agreed on.
            beat: Reports a phase of the step, for the heartbeat.

        Returns:
            The synchronised figures; None if the ranks don't meet after this step.
        """
        return SyncedFigures([(figures.loss, figures.count)], figures, 1.0)

    def finalize(self, step: int) -> SyncedFigures | None:
        """End the run.

        On return, all replicas hold the same weights. Returns None if no meeting was left.
        """
        return None

    def drain(self) -> None:
        """Wait for pending communication, before ranks communicate for another purpose."""
        return

    def global_weights(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the weights that all replicas share, in place of those that this rank trains.

        The shared weights count as the run's.
        """
        return weights

    def global_weights_in_place(self) -> AbstractContextManager[None]:
        """Let the model compute with the shared weights while the context is entered."""
        return nullcontext()


class SyncEveryStep(StepSync):
    """The step synchronisation of plans whose ranks all meet in every step."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
