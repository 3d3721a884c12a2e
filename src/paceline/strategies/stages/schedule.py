"""Pipeline schedules: the order in which each rank works. The simulator and the runtime use the
same order.

Sources: Huang et al. 2019 (GPipe: all forwards, then all backwards); Narayanan et al. 2019 and 2021
(1F1B and its interleaved form); Qi et al. 2024 (zero bubble, ZB-H1: backward in two parts, the
memory of 1F1B).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple

from paceline.strategies.stages.keys import ScheduleName, splits_backward

if TYPE_CHECKING:
    from paceline.strategies.plan import Plan

# F: forward. B: backward. I: only the gradients of inputs. W: only the gradients of weights.
ActionKind = Literal["F", "B", "I", "W"]


_SECONDS: dict[ActionKind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
# The actions that each kind of action needs: (kind, stage relative to its own).
_NEEDED: dict[ActionKind, list[tuple[ActionKind, int]]] = {
    "F": [("F", -1)],
    "B": [("F", 0), ("B", 1)],
    "I": [("F", 0), ("I", 1)],
    "W": [("I", 0)],
}


class Action(NamedTuple):
    """The work of one stage on one micro-batch.

    >>> str(Action("F", 2, 0))
    'F2.0'
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    def needs(self, num_stages: int) -> list[Action]:
        """Return the actions of any rank that must be done before this one.

        The last stage's backward needs only its own forward.
        """
        return [
            Action(kind, self.stage + away, self.microbatch)
            for kind, away in _NEEDED[self.kind]
            if 0 <= self.stage + away < num_stages
        ]


def kinds_of(plan: Plan) -> tuple[ActionKind, ...]:
    """Return the kinds of actions that a rank runs for each micro-batch of a stage, in order."""
    return ("F", "I", "W") if splits_backward(plan) else ("F", "B")


def stages_of(rank: int, *, num_ranks: int, virtual: int) -> list[int]:
    """Return the stages that a rank holds: every `num_ranks`-th one.

    >>> stages_of(1, num_ranks=2, virtual=2)
    [1, 3]
    """
    return [rank + num_ranks * turn for turn in range(virtual)]


def schedule(
    name: ScheduleName, *, num_ranks: int, num_microbatches: int, virtual: int = 1
) -> list[list[Action]]:
    """Return each rank's actions in order.

    No schedule can block if ranks run their actions in this order and wait only for the actions
    that they need.
    """
    if name == "zero-bubble":
        return _zero_bubble(num_ranks, num_microbatches)
    # The interleaved order can block if the micro-batches don't fill whole rounds. More forwards
    # ahead never block.
    for more in count():
        orders = [
            _forward_backward(name, rank, num_ranks, num_microbatches, virtual, more)
            for rank in range(num_ranks)
        ]
        if virtual == 1 or not blocked(orders, num_stages=num_ranks * virtual):
            return orders
    raise AssertionError


def blocked(orders: Sequence[Sequence[Action]], *, num_stages: int) -> bool:
    """Whether ranks that follow these orders wait for each other forever."""
    return len(merged(orders, num_stages=num_stages)) < sum(map(len, orders))


def merged(orders: Sequence[Sequence[Action]], *, num_stages: int) -> list[tuple[int, Action]]:
    """Return the actions of all ranks, each with its rank, and after the actions that it needs.

    Actions for which ranks would wait forever are left out.
    """
    actions: list[tuple[int, Action]] = []
    done: set[Action] = set()
    remaining = [list(reversed(order)) for order in orders]
    before = -1
    while before < len(done):
        before = len(done)
        for rank, order in enumerate(remaining):
            while order and done.issuperset(order[-1].needs(num_stages)):
                done.add(order[-1])
                actions.append((rank, order.pop()))
    return actions


def _forward_backward(
    name: ScheduleName, rank: int, num_ranks: int, num_microbatches: int, virtual: int, more: int
) -> list[Action]:
    """Order a rank's actions: first some forwards, then one forward and one backward in turns, then
    the other backwards."""

    def rounds(kind: ActionKind, turns: Sequence[int]) -> list[Action]:
        """Return `num_ranks` micro-batches for one stage of the rank, then for the next."""
        return [
            Action(kind, rank + num_ranks * turn, microbatch)
            for first in range(0, num_microbatches, num_ranks)
            for turn in turns
            for microbatch in range(first, min(first + num_ranks, num_microbatches))
        ]

    forwards, backwards = rounds("F", range(virtual)), rounds("B", range(virtual)[::-1])
    if name == "gpipe":
        ahead = len(forwards)
    elif virtual == 1:
        ahead = num_ranks - rank - 1
    else:
        ahead = 2 * (num_ranks - rank - 1) + (virtual - 1) * num_ranks
    ahead = min(ahead + more, len(forwards))
    turns = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return [*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]]


def _zero_bubble(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Make the order of the zero-bubble schedule by a greedy choice.

    A free rank takes a gradient that others wait for; otherwise a forward; otherwise a weight
    gradient. Within each kind, a rank takes micro-batches in order. The algorithm therefore
    compares only three actions of a rank, and compares them again only after the rank or a
    neighbour has taken an action.
    """
    best: dict[ActionKind, int] = {"I": 0, "F": 1, "W": 2}
    ended: dict[ActionKind, list[list[float]]] = {
        kind: [[] for _ in range(num_ranks)] for kind in best
    }
    free = [0.0] * num_ranks
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]

    def ready_at(kind: ActionKind, rank: int, microbatch: int) -> float:
        """Return the time at which an action can start; infinite while it is unknown.

        See `Action.needs`.
        """
        latest = free[rank]
        for needed, stage in _NEEDED[kind]:
            if 0 <= rank + stage < num_ranks:
                times = ended[needed][rank + stage]
                latest = max(latest, times[microbatch]) if microbatch < len(times) else math.inf
        return latest

    def choice(rank: int) -> tuple[float, int, int, int, ActionKind]:
        candidates = []
        for kind, order in best.items():
            microbatch = len(ended[kind][rank])
            is_full = kind == "F" and microbatch - len(ended["W"][rank]) >= num_ranks
            if microbatch < num_microbatches and not is_full:
                candidates.append((ready_at(kind, rank, microbatch), order, microbatch, rank, kind))
        return min(candidates, default=(math.inf, 0, 0, rank, "F"))

    choices = [choice(rank) for rank in range(num_ranks)]
    while (first := min(choices))[0] < math.inf:
        start, _, microbatch, rank, kind = first
        free[rank] = start + _SECONDS[kind]
        ended[kind][rank].append(free[rank])
        orders[rank].append(Action(kind, rank, microbatch))
        for near in range(max(0, rank - 1), min(num_ranks, rank + 2)):
            choices[near] = choice(near)
    return orders


def in_flight(order: Sequence[Action]) -> int:
    """Return the largest number of forwards whose activations a rank holds at one time."""
    current = most = 0
    for action in order:
        current += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most = max(most, current)
    return most
