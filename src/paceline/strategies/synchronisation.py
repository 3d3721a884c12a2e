"""Kinds of synchronisation: which ranks update weights, and how many ranks are needed.

A plan has one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.strategies.local.keys import Local
    from paceline.strategies.plan import Axes, Plan

ZeroStage = Literal[1, 2, 3]


class Synchronisation:
    """The interface of all kinds of synchronisation.

    By default, the number of ranks is the product of the axes, and each rank computes gradients.
    """

    __slots__ = ()

    def num_ranks(self, axes: Axes) -> int:
        """Return the number of processes that run the plan."""
        return math.prod(axes.sizes().values())

    def num_replicas(self, axes: Axes) -> int:
        """Return the number of parts of a step's batch: the number of ranks that see different
        samples."""
        return axes.num_ranks(lambda axis: axis.cuts_samples)

    def num_copies(self, axes: Axes) -> int:
        """Return the number of copies of the model's weights on ranks that compute with them."""
        return axes.num_ranks(lambda axis: axis.copies_weights)

    def num_workers(self, axes: Axes) -> int:
        """Return the number of ranks that compute gradients."""
        return self.num_ranks(axes)

    def num_savers(self, axes: Axes) -> int:
        """Return the number of ranks over which the state of a run is divided when it is saved or
        copied."""
        return self.num_ranks(axes)

    @property
    def num_cpu_ranks(self) -> int:
        """The number of first ranks that compute on the CPU even if the others have GPUs."""
        return 0

    @property
    def leaves_state(self) -> bool:
        """Whether the ranks' memory between two updates contains the whole state of a run.

        See `training/parts/live_state.py`.
        """
        return self.outer_steps is None

    @property
    def outer_steps(self) -> Local | None:
        """The settings of outer steps; None if replicas combine their gradients in every step."""
        return None

    def of_forwards(self, plan: Plan) -> Plan:
        """Return the plan for runs without updates."""
        return plan


@dataclass(frozen=True, slots=True)
class AllReduce(Synchronisation):
    """The synchronisation in which every update waits for the gradients of all replicas."""

    # The state that the shard axis splits. 1: optimizer state; 2: also gradients; 3: also
    # parameters.
    zero: ZeroStage = 3
