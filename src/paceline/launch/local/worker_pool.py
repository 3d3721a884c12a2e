"""Warm ranks as a controller sees them: the slots of one node or of several, their tasks, and what happens there.

`Pool` has the slots of this machine, `NodesPool` those of several nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from paceline.launch.process.fault_policy import FaultPolicy
from paceline.launch.process.messages import Message

STOP_S = 0.7  # for ranks that are asked to stop to finish their step; then they are killed


class WorkerPool(Protocol):
    """A warm process in each slot. A task has a rank in each of some slots of one node."""

    @property
    def names(self) -> Sequence[str]:
        """The device of each slot, as its node calls it."""

    @property
    def nodes(self) -> Sequence[Sequence[int]]:
        """The slots of each node that is there."""

    @property
    def free(self) -> Sequence[int]:
        """Slots without a task."""

    def place(self, slot: int) -> str:
        """A slot's node, if there are several, and device."""

    def describe(self) -> str:
        """Where the slots are, for people."""

    def start(
        self,
        payload: Any,
        slots: Sequence[int],
        *,
        fault_policy: FaultPolicy,
        log_dir: Path | None = None,
    ) -> int:
        """Start a task with a rank in each of these free slots. Returns its number, which its events bear."""

    def answer(self, question: Message, value: Any) -> None:
        """Answer a question, if its task has not ended since."""

    def stop(self, number: int, *, patience_s: float = STOP_S) -> None:
        """Ask a task's ranks to end after their step; those that have not in time are killed."""

    def wait(self, timeout_s: float) -> list[Message]:
        """What happened, at once if something has, else within the timeout."""


def room(ranks: WorkerPool, count: int) -> tuple[int, ...] | None:
    """So many free slots of one node, of that which has the fewest to spare; None if no node has as many free."""
    free = set(ranks.free)
    fitting = [
        slots
        for node in ranks.nodes
        if len(slots := [slot for slot in node if slot in free]) >= count
    ]
    return tuple(min(fitting, key=len)[:count]) if fitting else None


def node_of(ranks: WorkerPool, slot: int) -> Sequence[int]:
    """The slots of a slot's node."""
    return next(node for node in ranks.nodes if slot in node)


def largest(ranks: WorkerPool) -> int:
    """The most ranks that a task can have."""
    return max(map(len, ranks.nodes))
