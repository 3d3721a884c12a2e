"""Computes the time of a schedule from the seconds of its actions. Equal rounds are simulated once
and multiplied.

Once a pipeline is full, a round of as many micro-batches as ranks takes as long as the round
before. Two simulations that differ by one round give the length of a round, and so the time for any
number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from paceline.strategies.stages.keys import ScheduleName
from paceline.strategies.stages.layer_cut import orders_of
from paceline.strategies.stages.schedule import Action, ActionKind, merged

ROUNDS = 2  # simulated rounds before further rounds are assumed to take equally long
FIRST, MIDDLE, LAST = "first", "middle", "last"  # micro-batches of a step
Key = tuple[int, ActionKind, str]  # stage, kind of action, FIRST, MIDDLE or LAST micro-batch


@dataclass(frozen=True, slots=True)
class ActionSeconds:
    """The seconds of an action."""

    self_s: float  # that the rank computes
    sent_s: float = 0.0  # until the result is with the rank that needs it
    waits: bool = False  # whether the rank waits until then


def rank_ends(
    name: ScheduleName,
    action_seconds: Mapping[Key, ActionSeconds],
    *,
    num_ranks: int,
    num_microbatches: int,
    virtual: int = 1,
) -> list[float]:
    """Return the time at which each rank ends its actions, in seconds."""
    fewer = shortened(num_ranks, num_microbatches)
    if fewer == num_microbatches:
        return _played(_course(name, num_ranks, num_microbatches, virtual), action_seconds)
    shorter = _played(_course(name, num_ranks, fewer, virtual), action_seconds)
    longer = _played(_course(name, num_ranks, fewer + num_ranks, virtual), action_seconds)
    rounds = (num_microbatches - fewer) // num_ranks
    return [
        end_s + rounds * (later_s - end_s) for end_s, later_s in zip(shorter, longer, strict=True)
    ]


def shortened(num_ranks: int, num_microbatches: int) -> int:
    """Return the number of micro-batches of a shorter step with equal beginning and end and fewer
    equal rounds."""
    fewer = ROUNDS * num_ranks + num_microbatches % num_ranks
    return fewer if fewer + num_ranks < num_microbatches else num_microbatches


@dataclass(frozen=True, slots=True)
class _Course:
    """All actions of all ranks, in an order in which each comes after the actions that it needs."""

    keys: tuple[Key, ...]
    # (rank, number of the action's key, position of the action that it waits for on another rank,
    # or -1).
    steps: tuple[tuple[int, int, int], ...]
    num_ranks: int


@lru_cache(maxsize=512)
def _course(name: ScheduleName, num_ranks: int, num_microbatches: int, virtual: int) -> _Course:
    orders, num_stages = orders_of(name, num_ranks, num_microbatches, virtual), num_ranks * virtual
    position: dict[Action, int] = {}
    keys: dict[Key, int] = {}
    steps: list[tuple[int, int, int]] = []
    for rank, action in merged(orders, num_stages=num_stages):
        others = (each for each in action.needs(num_stages) if each.stage != action.stage)
        needed = next((position[other] for other in others), -1)
        key = (action.stage, action.kind, which(action.microbatch, num_microbatches))
        position[action] = len(steps)
        steps.append((rank, keys.setdefault(key, len(keys)), needed))
    return _Course(tuple(keys), tuple(steps), num_ranks)


def which(microbatch: int, num_microbatches: int) -> str:
    """Return whether a micro-batch is the step's first, its last, or one between."""
    return LAST if microbatch == num_microbatches - 1 else FIRST if microbatch == 0 else MIDDLE


def _played(course: _Course, action_seconds: Mapping[Key, ActionSeconds]) -> list[float]:
    figures: Sequence[ActionSeconds] = [action_seconds[key] for key in course.keys]
    self_s = [figure.self_s for figure in figures]
    sent_s = [figure.sent_s for figure in figures]
    waited_s = [figure.sent_s if figure.waits else 0.0 for figure in figures]
    free_s, arrived_s = [0.0] * course.num_ranks, [0.0] * len(course.steps)
    for position, (rank, key, needed) in enumerate(course.steps):
        start_s = free_s[rank]
        if needed >= 0 and arrived_s[needed] > start_s:
            start_s = arrived_s[needed]
        end_s = start_s + self_s[key]
        free_s[rank] = end_s + waited_s[key]
        arrived_s[position] = end_s + sent_s[key]
    return free_s
