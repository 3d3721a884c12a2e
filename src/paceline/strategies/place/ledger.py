"""The memory that each device of a placement needs, by purpose, and a table of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        return self.weights + self.gradients + self.optimizer + self.activations

    def __add__(self, other: PieceMemory) -> PieceMemory:
        return PieceMemory(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.activations + other.activations,
        )


def by_device(
    needs: Mapping[str, PieceMemory], part_of: Mapping[str, int], num_parts: int
) -> list[PieceMemory]:
    """Return the sum of the pieces' memory for each device."""
    sums = [PieceMemory() for _ in range(num_parts)]
    for key, need in needs.items():
        sums[part_of[key]] += need
    return sums


def table(needs: Sequence[PieceMemory], names: Sequence[str], memory_bytes: Sequence[float]) -> str:
    """Format the ledger as a table in MiB, with one line per device."""
    return aligned(
        ["device", "weights", "gradients", "optimizer", "activations", "sum", "has MiB"],
        [
            [
                name,
                *(
                    f"{size / MIB:.1f}"
                    for size in (
                        need.weights,
                        need.gradients,
                        need.optimizer,
                        need.activations,
                        need.total,
                    )
                ),
                f"{has / MIB:.0f}{' too much' * (need.total > has)}",
            ]
            for need, name, has in zip(needs, names, memory_bytes, strict=True)
        ],
    )
