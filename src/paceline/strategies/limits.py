"""The limits that a job and a number of devices set to plans."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.strategies.plan_fields import RecomputeName


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that a job sets to plans."""

    batch: int  # samples per optimizer step
    layers: int = 0  # a pipeline can be cut between these; 0 if the model can't be cut
    tensor: int = 1  # the most parts into which layers can be cut; 1 if they can't
    parts: int = 1  # the most parts into which modules can be placed; 1 if they can't
    # Allowed ways to recompute activations, from the least computing to the most.
    recomputes: tuple[RecomputeName, ...] = ("none", "full")
    # Number of steps of the run, if blocks may be compiled for it; None if not.
    compiled_steps: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceCounts:
    """The number of devices of a cluster."""

    num_devices: int
    per_node: int  # devices of one node
    may_be_fewer: bool = False  # whether a plan may leave some devices out

    @property
    def counts(self) -> list[int]:
        """The numbers of devices that plans may use."""
        return divisors(self.num_devices) if self.may_be_fewer else [self.num_devices]


def divisors(count: int) -> list[int]:
    """Return the divisors of a number in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(count**0.5) + 1) if count % d == 0]
    return small + [count // d for d in reversed(small) if d * d != count]
