"""How the workers of a run evaluate it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.base.errors import JobError
from paceline.job import Job
from paceline.job.metrics import OfAllSamples
from paceline.servers.peers import Peers
from paceline.training.evaluate import quotients


@dataclass
class _Sums:
    """What comes in from the workers of one evaluation."""

    number: int
    awaited: set[int]
    by_name: dict[str, torch.Tensor] = field(default_factory=dict)
    refused: JobError | None = None  # why one of them refuses a metric


class WorkersEvaluator:
    """Has every worker evaluate its part of the validation data; see `RunEvaluator`.

    version: gives the updates that are made, while nothing is on its way. attend: hears what comes in next.
    step_schedule: has all servers step their schedules.
    """

    def __init__(
        self,
        job: Job,
        peers: Peers,
        *,
        version: Callable[[], int],
        attend: Callable[[], None],
        step_schedule: Callable[[Mapping[str, float]], None],
    ) -> None:
        self.job, self.peers, self.version, self.attend = job, peers, version, attend
        self.step_schedule = step_schedule
        self.number = 0
        self.sums: _Sums | None = None

    def evaluate(self) -> tuple[dict[str, float], JobError | None]:
        self.peers.excuse_silence()
        self.sums = None
        while self.sums is None or self.sums.awaited:
            if self.sums is None and self.peers.workers:
                self.sums = self._begin()
            self.attend()
        sums, self.sums = self.sums, None
        return quotients({name: sums.by_name[name].tolist() for name in sums.by_name}), sums.refused

    def lose_worker(self) -> None:
        """What a worker was to evaluate is missing: the evaluation is begun anew."""
        self.sums = None

    def fault(self, message: dict[str, Any]) -> str | None:
        """What is wrong with the figures of a worker."""
        names = message["names"]
        if len(set(names)) != len(names) or len(names) != len(message["values"]):
            return f"it evaluated {len(message['values'])} figures of {len(set(names))}"
        is_own = self.job.own_validate is not None  # and may give other figures of each batch
        due = ["loss", *({} if is_own else self.job.metrics)]
        if (names[:1] if is_own else names) != due:
            return f"it evaluated {', '.join(names)[:200]} where {', '.join(due)} are due"
        return None

    def add(self, worker: int, message: dict[str, Any]) -> None:
        """A worker has evaluated its part."""
        sums = self.sums
        if sums is None or message["sums"] != sums.number or worker not in sums.awaited:
            return
        sums.awaited.discard(worker)
        if message["refused"]:
            sums.refused = JobError(message["refused"][0])
        for name, value in zip(message["names"], message["values"], strict=True):
            before = sums.by_name.get(name, 0.0)
            sums.by_name[name] = torch.tensor(value, dtype=torch.float64) + before

    def _begin(self) -> _Sums:
        """Give every worker its part, once it is idle; all have the same weights. One has all of it if a metric needs
        that."""
        self.number += 1
        workers = sorted(self.peers.workers)
        if any(isinstance(metric, OfAllSamples) for metric in self.job.metrics.values()):
            workers = workers[:1]
        for part, worker in enumerate(workers):
            order = {"evaluate": self.number, "part": part, "of": len(workers)}
            self.peers.say(worker, {**order, "version": self.version()})
        return _Sums(self.number, set(workers))
