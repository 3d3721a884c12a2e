"""Kinds of synchronisation: who updates weights, and how many ranks that takes. A plan has one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.strategies.local.keys import Local
    from paceline.strategies.plan import Axes, Plan

ZeroStage = Literal[1, 2, 3]


class Synchronisation:
    """What a plan asks of any kind. Here ranks are the product of the axes, and each computes gradients."""

    __slots__ = ()

    def num_ranks(self, axes: Axes) -> int:
        """Processes that run the plan."""
        return math.prod(axes.sizes().values())

    def num_replicas(self, axes: Axes) -> int:
        """Parts that a step's batch is cut into: ranks that see different samples."""
        return axes.num_ranks(lambda axis: axis.cuts_samples)

    def num_copies(self, axes: Axes) -> int:
        """Times that the model's weights are held by those that compute with them."""
        return axes.num_ranks(lambda axis: axis.copies_weights)

    def num_workers(self, axes: Axes) -> int:
        """Ranks that compute gradients."""
        return self.num_ranks(axes)

    def num_savers(self, axes: Axes) -> int:
        """Ranks that the state of a run is divided over when it is saved or copied."""
        return self.num_ranks(axes)

    @property
    def num_cpu_ranks(self) -> int:
        """Ranks, the first ones, that compute on the CPU also where the others have GPUs."""
        return 0

    @property
    def leaves_state(self) -> bool:
        """Whether what ranks hold between two updates is the whole state of a run; see
        `training/parts/live_state.py`."""
        return self.outer_steps is None

    @property
    def outer_steps(self) -> Local | None:
        """How replicas that take steps of their own meet; None if gradients meet in every step."""
        return None

    def of_forwards(self, plan: Plan) -> Plan:
        """What is left of the plan where nothing is updated."""
        return plan


@dataclass(frozen=True, slots=True)
class AllReduce(Synchronisation):
    """Every update waits for the gradients of all replicas.

    zero: what the shard axis splits: 1 optimizer state, 2 and gradients, 3 and parameters.
    """

    zero: ZeroStage = 3
