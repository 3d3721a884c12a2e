"""What workers bring together within a step of the job's own: figures that are summed, and updates of one optimizer.

All workers go through the same step, and each waits for what comes of a meeting. So there is one at a time, and what
workers bring to it must be alike. Pure, without any effects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.base.errors import TrainingError
from paceline.job.own_step import spec
from paceline.strategies.server.shards import Shard


@dataclass(frozen=True, slots=True)
class Sums:
    """Figures of all workers, summed in the workers' order."""

    number: int
    values: list[float]


@dataclass(frozen=True, slots=True)
class OneUpdate:
    """An update of one optimizer, whose gradient all servers hold.

    clip: what gradients are scaled by to stay within the optimizer's norm. unused: parameters that no worker used.
    """

    number: int
    optimizer: str
    clip: float
    unused: frozenset[str]


@dataclass
class Meetings:
    """
    num_workers: that bring something to each meeting.
    holders: servers that hold some of what each optimizer updates.
    clips: the greatest norm of each optimizer's gradients; None without one.
    number: of the meeting that is due; the first one's is the version of the first weights.
    """

    num_workers: int
    holders: Mapping[str, frozenset[int]]
    clips: Mapping[str, float | None]
    number: int
    brought: dict[int, dict[str, Any]] = field(default_factory=dict)
    squares: dict[int, dict[int, float]] = field(
        default_factory=dict
    )  # of gradients, by meeting and server

    @classmethod
    def of(
        cls,
        optimizers: Mapping[str, Any],
        shards: Sequence[Shard],
        *,
        num_workers: int,
        number: int,
    ) -> Meetings:
        """Those of a job with these optimizers by name."""
        holders = {
            name: frozenset(server for server, shard in enumerate(shards) if shard.updated_by(name))
            for name in optimizers
        }
        return cls(
            num_workers,
            holders,
            {name: spec(each).clip for name, each in optimizers.items()},
            number,
        )

    def fault(self, worker: int, message: dict[str, Any]) -> str | None:
        """What is wrong with what a worker brings."""
        number = message["figures"] if "figures" in message else message["update"]
        if number != self.number or worker in self.brought:
            return f"it came to meeting {number} of a step when {self.number} was due"
        if "update" in message and message["optimizer"] not in self.holders:
            return f"it updates the optimizer '{message['optimizer'][:40]}', which the job doesn't have"
        return None

    def bring(self, worker: int, message: dict[str, Any]) -> None:
        """
        Raises:
            TrainingError: another worker brought something else.
        """
        for other, other_message in self.brought.items():
            if _kind(other_message) != _kind(message):
                raise TrainingError(
                    f"ranks do different things in a step: worker {other} is at {_in_words(other_message)}, and worker "
                    f"{worker} at {_in_words(message)}",
                    hint="all ranks must call the same verbs in the same order: a condition on samples holds on some "
                    "ranks alone; give each sample a weight in the loss in its place",
                )
        self.brought[worker] = message

    def hold(self, server: int, number: int, squares: float) -> None:
        """A server holds all of its part of an update's gradient, with this sum of squares."""
        if number >= self.number:  # else a worker made it up
            self.squares.setdefault(number, {})[server] = squares

    def take_result(self) -> Sums | OneUpdate | None:
        """What comes of the meeting, once all is there; it is over then."""
        if len(self.brought) < self.num_workers:
            return None
        messages, number = [self.brought[worker] for worker in sorted(self.brought)], self.number
        result: Sums | OneUpdate
        if "figures" in messages[0]:
            result = Sums(
                number,
                [sum(column) for column in zip(*(m["values"] for m in messages), strict=True)],
            )
        else:
            name, squares = messages[0]["optimizer"], self.squares.get(number, {})
            if not squares.keys() >= self.holders[name]:
                return None
            norm = math.sqrt(sum(squares[server] for server in sorted(self.holders[name])))
            clip = clip_factor(norm, self.clips[name])
            result = OneUpdate(
                number,
                name,
                clip,
                frozenset.intersection(*(frozenset(m["unused"]) for m in messages)),
            )
        self.brought, self.number = {}, number + 1
        self.squares.pop(number, None)
        return result


def clip_factor(norm: float, greatest: float | None) -> float:
    """What a gradient of this norm is scaled by, as `clip_grad_norm_` does; greatest: None for no limit."""
    return 1.0 if greatest is None else min(1.0, greatest / (norm + 1e-6))


def _kind(message: dict[str, Any]) -> tuple[str, Any]:
    """What must be alike in what workers bring."""
    if "figures" in message:
        return "figures", len(message["values"])
    return "update", message["optimizer"]


def _in_words(message: dict[str, Any]) -> str:
    return (
        "the loss of a backward, or the end"
        if "figures" in message
        else f"ctx.update('{message['optimizer']}')"
    )
