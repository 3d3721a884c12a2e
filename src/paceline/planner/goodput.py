"""Predict a long run on devices that fail: how often to save, and which part of the time is
useful.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.cluster import Cluster
from paceline.planner import one_host, several_hosts
from paceline.planner.problem import PlanningProblem
from paceline.planner.search import Candidate, amount
from paceline.planner.survival import (
    FailingRun,
    FailureRates,
    NoSurvival,
    Survival,
    SurvivalName,
    in_hours,
)
from paceline.simulate.failures import RESTART_S


@dataclass(frozen=True, slots=True)
class Goodput:
    """The cost of failures under a plan."""

    state_bytes: int  # of a checkpoint
    bytes_per_s: float  # at which all ranks that hold the state write it together
    # the ways that exist under the plan on the cluster; the last one resumes the run
    survivals: tuple[Survival, ...]
    refused: Mapping[SurvivalName, str] = field(default_factory=dict)  # why other ways don't exist

    @property
    def resumed(self) -> Survival:
        """The way that outlives any failure."""
        return self.survivals[-1]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        failures, resumed = self.resumed.failures, self.resumed
        return {
            "mtbf_s": failures.mtbf_s,
            "checkpoint_bytes": self.state_bytes,
            "checkpoint_bytes_per_s": self.bytes_per_s,
            "checkpoint_write_s": failures.write_s,
            "restart_s": failures.restart_s,
            "checkpoint_interval_s": resumed.interval_s,
            "goodput": resumed.goodput,
            "survival": {survival.name: survival.to_dict() for survival in self.survivals},
            "survival_refused": dict(self.refused),
        }

    def lines(self) -> Iterator[str]:
        """Yield lines for people: how often to save, and a sentence for each way to survive."""
        failures = self.resumed.failures
        yield (
            f"with a failure every {in_hours(failures.mtbf_s)}: a checkpoint every "
            f"{in_hours(self.resumed.interval_s)}; {amount(self.state_bytes)} are written in "
            f"{failures.write_s:.3g} s at {self.bytes_per_s / 1e9:.3g} GB/s, and training waits "
            f"{failures.waited_s:.2g} s of it"
        )
        yield from (f"{survival.name}: {survival.describe()}" for survival in self.survivals)
        names: dict[str, list[str]] = {}
        for name, why in self.refused.items():
            names.setdefault(why, []).append(name)
        yield from (
            f"no way here: {' and '.join(of_why)}, as {why}" for why, of_why in names.items()
        )


def outlook(
    problem: PlanningProblem, chosen: Candidate, cluster: Cluster, rates: FailureRates
) -> Goodput:
    """Predict what failures cost a plan that was chosen on a cluster."""
    run = FailingRun(problem, chosen, cluster, rates)
    is_one_host = not cluster.nodes or chosen.plan.world_size <= len(cluster.nodes[0].devices)
    survivals: list[Survival] = []
    refused: dict[SurvivalName, str] = {}
    for name, way in (one_host if is_one_host else several_hosts).ways(run):
        try:
            survivals.append(way())
        except NoSurvival as why:
            refused[name] = str(why)
    what_else = "a GPU or the host" if cluster.devices[0].kind == "cuda" else "the host"
    is_lost = f"--restarts 0, or {what_else} is lost" if is_one_host else "without --hosts"
    survivals.append(
        Survival.of(
            "resume",
            f"the run ends ({is_lost}) and is resumed from the newest checkpoint",
            *run.saving(RESTART_S),
        )
    )
    return Goodput(run.state_bytes, run.bytes_per_s, tuple(survivals), refused)
