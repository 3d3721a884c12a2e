"""Which updates are in the weights, as evidence that each is there once."""

from __future__ import annotations

from collections.abc import Iterable


class History:
    """The turns whose updates were applied.

    first: all before it were. later: those after it that were; no more than are computed at the same time.
    """

    def __init__(self, first: int, later: Iterable[int] = ()) -> None:
        self.first = first
        self.later: set[int] = set(later)

    @property
    def num_updates(self) -> int:
        """That were applied."""
        return self.first + len(self.later)

    def add(self, turn: int) -> None:
        """An update is about to be applied.

        Raises:
            ValueError: its turn's already was.
        """
        if turn < self.first or turn in self.later:
            raise ValueError(f"update {turn} was applied already")
        self.later.add(turn)
        while self.first in self.later:
            self.later.discard(self.first)
            self.first += 1

    def is_exactly(self, end: int) -> bool:
        """Whether the turns before `end` were applied, and nothing else."""
        return self.first == end and not self.later

    def __str__(self) -> str:
        also = f" and {', '.join(map(str, sorted(self.later)))}" if self.later else ""
        return f"the updates before {self.first}{also}"
