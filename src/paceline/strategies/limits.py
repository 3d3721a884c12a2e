"""What a job and a number of devices allow of plans."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.strategies.plan import RecomputeName


@dataclass(frozen=True, slots=True)
class Limits:
    """What a job allows.

    batch: samples an optimizer step. layers: that a pipeline can be cut between; 0 if the model can't be cut.
    tensor: the most parts that layers can be cut into; 1 if they can't. parts: the same for modules that are placed.
    recomputes: of its activations, from the least computing to the most.
    compiled_steps: of the run, if blocks may be compiled for it; None if not.
    """

    batch: int
    layers: int = 0
    tensor: int = 1
    parts: int = 1
    recomputes: tuple[RecomputeName, ...] = ("none", "full")
    compiled_steps: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceCounts:
    """Devices of a cluster: how many, how many are in a node, and whether a plan may leave some of them out."""

    num_devices: int
    per_node: int
    may_be_fewer: bool = False

    @property
    def counts(self) -> list[int]:
        """Of devices that plans may use."""
        return divisors(self.num_devices) if self.may_be_fewer else [self.num_devices]


def divisors(count: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(count**0.5) + 1) if count % d == 0]
    return small + [count // d for d in reversed(small) if d * d != count]
