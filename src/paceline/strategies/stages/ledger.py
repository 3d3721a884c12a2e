"""The memory that each device of a placement needs, by purpose, and a table of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add

from paceline.base.errors import PlanError
from paceline.base.tables import aligned

MIB = 2**20


@dataclass(frozen=True, slots=True)
class PieceMemory:
    """Bytes that a piece of a model, or a device, holds in training."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0  # kept for backward, of all samples in flight

    @property
    def total(self) -> float:
        return sum(astuple(self))

    def __add__(self, other: PieceMemory) -> PieceMemory:
        return PieceMemory(*map(add, astuple(self), astuple(other)))


def refuse_overfull(
    needs: Mapping[str, PieceMemory], part_of: Mapping[str, int], memory_bytes: Sequence[float]
) -> None:
    """Refuse a placement under which a device needs more memory than it has.

    Raises:
        PlanError: the message has a table of the devices' memory in MiB.
    """
    sums = [PieceMemory() for _ in memory_bytes]
    for key, need in needs.items():
        sums[part_of[key]] += need
    if all(need.total <= has for need, has in zip(sums, memory_bytes, strict=True)):
        return
    table = aligned(
        ["device", "weights", "gradients", "optimizer", "activations", "sum", "has MiB"],
        [
            [
                f"part {part}",
                *(f"{size / MIB:.1f}" for size in (*astuple(need), need.total)),
                f"{has / MIB:.0f}{' too much' * (need.total > has)}",
            ]
            for part, (need, has) in enumerate(zip(sums, memory_bytes, strict=True))
        ],
    )
    raise PlanError(
        f"the placement doesn't fit:\n{table}",
        hint="more parts, smaller micro-batches (microbatches=M), or recompute=full",
    )
