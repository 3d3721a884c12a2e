"""Which ranks of a plan are servers, which are workers, and where they find each other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.base.waiting import waiting
from paceline.launch.process.context import RankContext
from paceline.strategies.plan import Plan
from paceline.strategies.server.keys import Servers

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.servers.wire import Uplink
    from paceline.training.settings import Settings


def servers_of(plan: Plan) -> Servers:
    assert isinstance(plan.sync, Servers)
    return plan.sync


@dataclass(frozen=True, slots=True)
class Roles:
    """Servers come first, so that rank 0, which speaks for the run, is the server that coordinates it.

    server, worker: this rank's number as such; None if it is none.
    """

    server: int | None
    worker: int | None

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Roles:
        first_worker = rank_of_worker(plan, 0)
        return cls(
            rank if rank < servers_of(plan).servers else None,
            rank - first_worker if rank >= first_worker else None,
        )


def rank_of_worker(plan: Plan, worker: int) -> int:
    """By its number among workers."""
    sync = servers_of(plan)
    return worker + (0 if sync.colocate == "yes" else sync.servers)


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a rank is to do in a run, and how it reaches the others. uplink: whose turn it is to send."""

    context: RankContext
    job: Job
    plan: Plan
    settings: Settings
    rendezvous: Rendezvous
    uplink: Uplink


@dataclass(slots=True)
class Rendezvous:
    """Where the processes of one training find each other; a launch may train several times, each under a key.

    lone_server: the address of the server of a rank that has no store, as it is the only rank.
    """

    context: RankContext
    key: str
    lone_server: tuple[str, int] | None = None

    def announce(self, server: int, address: tuple[str, int]) -> None:
        if self.context.store is None:
            self.lone_server = address
        else:
            self.context.store.set(f"{self.key}/server/{server}", json.dumps(address))

    def address(self, server: int) -> tuple[str, int]:
        """Where a server listens. Waits until it does."""
        if self.lone_server is not None:
            return self.lone_server
        assert self.context.store is not None
        with waiting:
            host, port = json.loads(self.context.store.get(f"{self.key}/server/{server}"))
        return host, port
