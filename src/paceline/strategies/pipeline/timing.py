"""How long a schedule takes, given the seconds of its actions. Equal rounds are played once and counted.

Once a pipeline is full, a round of as many micro-batches as ranks takes as long as the round before. Two plays that
differ by one round give the length of a round, and so the time for any number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from paceline.strategies.pipeline.cost import orders_of
from paceline.strategies.pipeline.keys import ScheduleName
from paceline.strategies.pipeline.schedule import ActionKind

ROUNDS = 2  # that are played before one is taken to be as long as the one before
FIRST, MIDDLE, LAST = "first", "middle", "last"  # micro-batches of a step
Key = tuple[int, ActionKind, str]  # stage, what is done, for which of the micro-batches


@dataclass(frozen=True, slots=True)
class ActionSeconds:
    """Seconds of an action: of the rank, and until what it makes is with the rank that needs it.

    waits: whether the rank goes on only then.
    """

    self_s: float
    sent_s: float = 0.0
    waits: bool = False


def rank_ends(
    name: ScheduleName,
    action_seconds: Mapping[Key, ActionSeconds],
    *,
    num_ranks: int,
    num_microbatches: int,
    virtual: int = 1,
) -> list[float]:
    """When each rank is through with its actions, in seconds."""
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
    """The micro-batches of a shorter step with the same beginning and end, and fewer of the rounds that are alike."""
    fewer = ROUNDS * num_ranks + num_microbatches % num_ranks
    return fewer if fewer + num_ranks < num_microbatches else num_microbatches


@dataclass(frozen=True, slots=True)
class _Course:
    """All actions in an order in which each comes after what it needs.

    steps: (rank, number of its key, position of what it waits for on another rank or -1).
    """

    keys: tuple[Key, ...]
    steps: tuple[tuple[int, int, int], ...]
    num_ranks: int


@lru_cache(maxsize=512)
def _course(name: ScheduleName, num_ranks: int, num_microbatches: int, virtual: int) -> _Course:
    orders, num_stages = orders_of(name, num_ranks, num_microbatches, virtual), num_ranks * virtual
    num_done = [0] * num_ranks
    position: dict[tuple[ActionKind, int, int], int] = {}
    keys: dict[Key, int] = {}
    steps: list[tuple[int, int, int]] = []
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while num_done[rank] < len(order):
                action = order[num_done[rank]]
                kind, stage, microbatch = action.kind, action.stage, action.microbatch
                source = stage - 1 if kind == "F" else num_stages if kind == "W" else stage + 1
                needed = -1
                if 0 <= source < num_stages:
                    needed = position.get((kind, source, microbatch), -1)
                    if needed < 0:
                        break
                key = (stage, kind, which(microbatch, num_microbatches))
                position[kind, stage, microbatch] = len(steps)
                steps.append((rank, keys.setdefault(key, len(keys)), needed))
                num_done[rank] += 1
                moved = True
    return _Course(tuple(keys), tuple(steps), num_ranks)


def which(microbatch: int, num_microbatches: int) -> str:
    """Whether a micro-batch is the step's last, its first, or between."""
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
