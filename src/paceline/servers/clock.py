"""Who may start which turn, and when an update is complete: the protocol of bounded staleness, without any effects.

A turn leads to one update, however stale. With staleness 0 every turn is cut into one part for each worker, and the
next turn begins when the update is made. With more, a turn is one part, and each worker takes the next free one. It may
do so while it has finished at most `staleness` more than the slowest worker.

An update is made once: when every server holds all of its gradient and its workers have reported their losses. If a
worker dies before that, all servers drop what it left, and its turn is given out again under another number.

A worker has up to two parts, the one that it computes and the next one, so that it can fetch the weights of the next
one meanwhile.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field

LEASES = 2  # that a worker has at most


@dataclass(frozen=True, slots=True)
class Lease:
    """A part of a turn that a worker computes.

    update: names the attempt; never used twice.
    part: of how many the turn has; the worker's place if there is more than one.
    version: updates that the weights must contain at least.
    """

    update: int
    turn: int
    part: int
    version: int


@dataclass(slots=True)
class _Update:
    """An attempt at a turn. workers: who computes each part."""

    turn: int
    workers: dict[int, int]
    finished: set[int] = field(default_factory=set)
    complete_on: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Worker:
    """finished: turns whose update is made, and those before it joined. sent: turns computed and not yet made.

    leased: updates that it has yet to compute, the first of them now.
    """

    finished: int
    sent: int = 0
    leased: list[int] = field(default_factory=list)


class Clock:
    """The state of all workers. Every method is told what happened; nothing waits in here.

    version: updates made. cursor: the next turn that nobody has had. end: the first that is not to be given out yet.

    Args:
        staleness: Turns that a worker may be ahead of the slowest; None for no bound.
        first: The first turn that is not done.
        later: Turns after it that are.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        num_servers: int,
        staleness: int | None,
        first: int = 0,
        later: Collection[int] = (),
        end: int = 0,
    ) -> None:
        self.num_workers, self.num_servers, self.staleness = num_workers, num_servers, staleness
        self.parts = num_workers if staleness == 0 else 1
        self.version, self.cursor = first + len(later), max(later, default=first - 1) + 1
        self.end = end
        self.workers: dict[int, _Worker] = {}
        self.updates: dict[int, _Update] = {}
        self.returned = [
            turn for turn in range(first, self.cursor) if turn not in later
        ]  # sorted lists are heaps
        self.next_update = 0
        self._slowest = 0  # turns that every worker has finished; kept while there is none
        self._versions = {0: self.version}  # when the slowest worker had finished so many

    def join(self, worker: int) -> None:
        """A worker is there: as far as the slowest."""
        if worker in self.workers:
            raise ValueError(f"worker {worker} is there already")
        self.workers[worker] = _Worker(self._slowest)

    def leave(self, worker: int) -> list[int]:
        """A worker is gone. Returns the updates to be dropped: what was not complete is given out again."""
        self.workers.pop(worker)
        dropped = [
            number
            for number, update in self.updates.items()
            if worker in update.workers.values() and not self._is_complete(update)
        ]
        for number in dropped:
            heapq.heappush(self.returned, self.updates.pop(number).turn)
        self._note_slowest()
        return dropped

    def lease(self, worker: int) -> Lease | None:
        """The next part for a worker; None if there is none for it yet."""
        member = self.workers[worker]
        if len(member.leased) >= LEASES:
            return None
        if self.staleness == 0:
            return self._lease_part(worker, member)
        if (
            member.leased and self.end - self.cursor <= self.num_workers
        ):  # the last ones are for whoever is free first
            return None
        started = member.finished + member.sent + len(member.leased)
        if member.sent > (self.staleness != 0):  # one on its way while the next is computed
            return None
        if self.staleness is not None and started - self._slowest > self.staleness:
            return None
        if self.returned:
            turn = heapq.heappop(self.returned)
        elif self.cursor < self.end:
            turn = self.cursor
            self.cursor += 1
        else:
            return None
        number = self._begin(turn)
        self.updates[number].workers[0] = worker
        member.leased.append(number)
        least = (
            0
            if self.staleness is None
            else self._versions[max(min(self._versions), started - self.staleness)]
        )
        return Lease(number, turn, 0, least)

    def _lease_part(self, worker: int, member: _Worker) -> Lease | None:
        """This worker's part of the turn that all work at, or of the one after it."""
        if len(self.workers) < self.num_workers:
            return None
        number = next(
            (number for number, update in self.updates.items() if worker not in update.workers),
            None,
        )
        if number is None:
            turn = self.version + len(self.updates)
            if len(self.updates) >= LEASES or turn >= self.end:
                return None
            self.cursor = turn + 1
            number = self._begin(turn)
        update = self.updates[number]
        update.workers[worker] = worker
        member.leased.append(number)
        return Lease(number, update.turn, worker, update.turn)

    def finished(self, worker: int, update: int) -> None:
        """A worker has computed its part and sent it off."""
        member = self.workers[worker]
        if member.leased[:1] != [update]:
            raise ValueError(f"worker {worker} finished update {update} and had {member.leased}")
        member.leased.pop(0)
        member.sent += 1
        self.updates[update].finished.add(worker)

    def gradient_complete(self, server: int, update: int) -> None:
        """A server holds its share of all parts of an update. Of one that was dropped it is no news."""
        if update in self.updates:
            self.updates[update].complete_on.add(server)

    def ready(self) -> list[int]:
        """Updates that can be made, oldest first."""
        return [number for number, update in self.updates.items() if self._is_complete(update)]

    def made(self, update: int) -> int:
        """An update is made. Returns its turn."""
        done = self.updates.pop(update)
        self.version += 1
        for worker in done.workers.values():
            if worker in self.workers:
                member = self.workers[worker]
                member.finished, member.sent = member.finished + 1, member.sent - 1
        self._note_slowest()
        return done.turn

    @property
    def is_drained(self) -> bool:
        """Whether every turn that was to be given out is done, so that the versions are the turns."""
        return self.version == self.end

    def _begin(self, turn: int) -> int:
        number, self.next_update = self.next_update, self.next_update + 1
        self.updates[number] = _Update(turn, {})
        return number

    def _is_complete(self, update: _Update) -> bool:
        return len(update.finished) == self.parts and len(update.complete_on) == self.num_servers

    def _note_slowest(self) -> None:
        slowest = min((member.finished for member in self.workers.values()), default=self._slowest)
        for count in range(self._slowest + 1, slowest + 1):
            self._versions[count] = self.version
        self._slowest = slowest
        for count in [count for count in self._versions if count < slowest - (self.staleness or 0)]:
            del self._versions[count]
