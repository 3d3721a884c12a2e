"""The plan keys `servers`, `workers`, `staleness`, `colocate` and `damping`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.base.errors import PlanError
from paceline.strategies.keys import PlanKeys, as_text, choice, count
from paceline.strategies.plan_fields import (
    AllReduce,
    AnyPlan,
    Axes,
    PlanFields,
    Synchronisation,
)

SERVERS = count("servers", "sync", "S", default=0, counts_ranks=True)
WORKERS = count("workers", "sync", "W", default=0, counts_ranks=True)
STALENESS = count("staleness", "sync", "0|K|inf", default=0, least=0, word="inf")
COLOCATE = choice("colocate", "sync", ("yes", "no"), default="no")
DAMPING = choice("damping", "sync", ("none", "inverse"), default="none")
OF_SERVERS = (SERVERS, WORKERS, STALENESS, COLOCATE, DAMPING)


@dataclass(frozen=True, slots=True)
class Servers(Synchronisation):
    """The synchronisation by parameter servers, which hold the parameters and the optimizer state.

    Workers send them gradients and fetch weights.
    """

    servers: int = SERVERS.default  # number of servers, each with a part of the parameters
    workers: int = WORKERS.default  # number of ranks that compute gradients
    # The batch of every step is divided over the workers. With staleness 0, the parts of the
    # gradient are summed to one update, and each worker waits for it. Above 0, each part is an
    # update of its own. A worker then starts its next part if it has done at most this number of
    # parts more than the slowest worker; with "inf" it never waits.
    staleness: int | Literal["inf"] = STALENESS.default
    # "yes" puts the servers into the first workers' processes. "no" gives each server its own rank.
    colocate: Literal["yes", "no"] = COLOCATE.default
    # "inverse" divides the learning rate of an update by its staleness in steps: the number of
    # updates that it has not seen, divided by the number of workers.
    damping: Literal["none", "inverse"] = DAMPING.default

    def num_ranks(self, axes: Axes) -> int:
        return self.workers + self.num_cpu_ranks

    def num_replicas(self, axes: Axes) -> int:
        return self.workers

    def num_copies(self, axes: Axes) -> int:
        return self.workers

    def num_workers(self, axes: Axes) -> int:
        return self.workers

    def num_savers(self, axes: Axes) -> int:
        return self.servers

    @property
    def num_cpu_ranks(self) -> int:
        """The number of servers with their own rank. These ranks come first."""
        return 0 if self.colocate == "yes" else self.servers

    def of_forwards(self, plan: AnyPlan) -> AnyPlan:
        """Return the plan for runs without updates, in which workers become replicas."""
        return replace(plan, axes=replace(plan.axes, data=self.workers), sync=AllReduce())


def _complete(values: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = [f"{key.name}={values[key.name]}" for key in OF_SERVERS if key.name in values]
    if not stated:
        return values
    if missing := [name for name in ("servers", "workers") if name not in values]:
        raise PlanError(
            f"{' '.join(stated)} is about servers, and the plan lacks {' and '.join(missing)}",
            hint="servers=S workers=W, each at least 1",
        )
    if "local" in values:
        raise PlanError(
            f"local={values['local']} and servers={values['servers']} don't compose: replicas meet in outer "
            "steps or through servers",
            hint="staleness=K lets workers of servers meet less",
        )
    if "zero" in values:
        raise PlanError(
            f"zero={values['zero']} splits the shard axis, and servers hold the state of this plan"
        )
    return values


def _problems(plan: PlanFields) -> list[str]:
    if not isinstance(sync := plan.sync, Servers):
        return []
    problems = []
    if sync.damping != "none" and sync.staleness == 0:
        problems.append(f"damping={sync.damping} is by staleness, and staleness=0 has none")
    if sync.colocate == "yes" and sync.servers > sync.workers:
        problems.append(
            f"colocate=yes puts servers={sync.servers} servers into workers={sync.workers} processes, at "
            "most one in each"
        )
    if split := [f"{axis}={size}" for axis, size in plan.axes.sizes().items() if size != 1]:
        problems.append(
            f"servers={sync.servers} and {' '.join(split)}: workers hold the whole model, and servers bring "
            "their gradients together"
        )
    if plan.modifiers.shares != "equal" and sync.staleness != 0:
        problems.append(
            f"shares={as_text(plan.modifiers.shares)} and staleness={sync.staleness}: with staleness a "
            "part of a batch is for whichever worker is free, so a faster one takes more of them by itself"
        )
    return problems


def _relaxes(plan: PlanFields) -> str:
    stale = isinstance(plan.sync, Servers) and plan.sync.staleness != 0
    return (
        "gradients are of weights that miss updates made meanwhile by other workers"
        if stale
        else ""
    )


def _exact(plan: AnyPlan) -> AnyPlan:
    if not isinstance(plan.sync, Servers):
        return plan
    return replace(plan, sync=replace(plan.sync, staleness=0, damping="none"))


KEYS = PlanKeys(
    keys=OF_SERVERS,
    sync=Servers,
    complete=_complete,
    problems=_problems,
    relaxes=_relaxes,
    exact=_exact,
)
