"""A way in which a run outlives failures, and what is known of a run to say what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from paceline.base.errors import PlanError, UsageError
from paceline.cluster.cluster import Cluster
from paceline.planner.estimate import NotPriced
from paceline.planner.problem import HOUR_S, PlanningProblem
from paceline.planner.search import Candidate, amount
from paceline.simulate.failures import (
    CHECKPOINT_BYTES_PER_S,
    NOTHING_LOST,
    RESTART_S,
    Failures,
    daly_interval_s,
    goodput,
    simulated_goodput,
)
from paceline.simulate.outages import Outages
from paceline.strategies.plan import Plan

SurvivalName = Literal["copies", "checkpoint", "fewer", "spare", "resume"]
REPAIR_HOURS = 1.0  # until a host, or a GPU, that failed is back, if nobody says. A guess.
COPIED_BYTES_PER_S = 6.5e9  # by one core, to memory that it has used before; measured on two cores
_NUM_PLAYED = 5000  # failures


@dataclass(frozen=True, slots=True)
class FailureRates:
    """How often devices fail, and how fast what is lost is back.

    mtbf_hours: Mean time between failures of one device. repair_hours: until a host, or a GPU, that failed is back.
    checkpoint_bytes_per_s: That one device writes, and reads; all write their part at the same time.

    Raises:
        UsageError: a figure is not above 0.
    """

    mtbf_hours: float
    repair_hours: float = REPAIR_HOURS
    checkpoint_bytes_per_s: float = CHECKPOINT_BYTES_PER_S

    def __post_init__(self) -> None:
        for name in ("mtbf_hours", "repair_hours", "checkpoint_bytes_per_s"):
            if not 0 < getattr(self, name) * HOUR_S < float("inf"):
                raise UsageError(f"{name} must be a number above 0, got {getattr(self, name)}")

    @property
    def repair_s(self) -> float:
        return self.repair_hours * HOUR_S


@dataclass(frozen=True)
class FailingRun:
    """A run of the chosen plan on devices that fail."""

    problem: PlanningProblem
    chosen: Candidate
    cluster: Cluster
    rates: FailureRates

    @property
    def plan(self) -> Plan:
        return self.chosen.plan

    @property
    def step_s(self) -> float:
        return self.chosen.estimate.step_s

    @property
    def mtbf_s(self) -> float:
        """Between failures of all devices together."""
        return self.rates.mtbf_hours * HOUR_S / self.plan.world_size

    @property
    def num_savers(self) -> int:
        return self.plan.sync.num_savers(self.plan.axes)

    @cached_property
    def state_bytes(self) -> int:
        """Of a checkpoint."""
        return sum((p.num_bytes + p.state_bytes) * p.count for p in self.problem.profile.parameters)

    @property
    def bytes_per_s(self) -> float:
        """At which all that hold the state write or read it together."""
        return self.num_savers * self.rates.checkpoint_bytes_per_s

    @property
    def copied_s(self) -> float:
        """For which training waits at a checkpoint."""
        return max(self.state_bytes / self.num_savers / COPIED_BYTES_PER_S, 1e-3)

    @property
    def read_s(self) -> float:
        """Of a checkpoint."""
        return max(self.state_bytes / self.bytes_per_s, 1e-3)

    def saving(self, restart_s: float) -> tuple[Failures, float]:
        """A run that goes on from the newest checkpoint, with its best interval: at least a step lies between two."""
        saving = Failures(
            self.mtbf_s,
            self.copied_s + self.read_s,
            restart_s + self.read_s,
            blocked_s=self.copied_s,
        )
        return saving, max(daly_interval_s(saving), self.step_s)

    @cached_property
    def resumed_s(self) -> float:
        """What it costs to resume a run that ended without a checkpoint of its last step."""
        saving, interval_s = self.saving(RESTART_S)
        return saving.restart_s + interval_s / 2


class NoSurvival(Exception):
    """Why a way does not exist for this plan on this cluster."""


def fitting_step_s(run: FailingRun, plan: Plan) -> float:
    """Of another plan on the first devices.

    Raises:
        NoSurvival: it can't be there, or does not fit.
    """
    try:
        estimate = run.problem.price(plan, run.cluster)
    except (PlanError, NotPriced) as error:
        raise NoSurvival(str(error).partition("\n")[0]) from error
    if not estimate.fits:
        missing_bytes = max(need.missing_bytes for need in estimate.needs)
        raise NoSurvival(f"'{plan}' needs {amount(missing_bytes)} more than a device has")
    return estimate.step_s


@dataclass(frozen=True, slots=True)
class Survival:
    """How a run outlives failures, and what they cost it then.

    words: what happens. interval_s: of work between copies or checkpoints, or of a step where ranks leave their state.
    goodput: the part of the time that lasts, by formula, of all devices that the run has; and as played.
    options: of the command, and what else sets this way apart, for `--json`.
    """

    name: SurvivalName
    words: str
    failures: Failures
    interval_s: float
    goodput: float
    simulated_goodput: float
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: SurvivalName,
        words: str,
        failures: Failures,
        interval_s: float,
        *,
        outages: Outages = NOTHING_LOST,
        used: float = 1.0,
        options: Mapping[str, Any] | None = None,
    ) -> Survival:
        """used: the part that the whole run makes of what its devices could do: spares wait."""
        lasting = goodput(failures, interval_s, outages)
        played = (
            simulated_goodput(failures, interval_s, outages, num_failures=_NUM_PLAYED)
            if lasting > 0.01
            else 0.0
        )
        return cls(name, words, failures, interval_s, used * lasting, used * played, options or {})

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "restart_s": self.failures.restart_s,
            "blocked_s": self.failures.waited_s,
            "write_s": self.failures.write_s,
            "interval_s": self.interval_s,
            "goodput": self.goodput,
            "simulated_goodput": self.simulated_goodput,
            **self.options,
        }

    def describe(self) -> str:
        return (
            f"{self.words}: {100 * self.goodput:.1f} % is progress "
            f"({100 * self.simulated_goodput:.1f} % as played), going back to at most "
            f"{in_hours(self.interval_s)} of work, {self.failures.restart_s:.3g} s after the failure"
        )


def in_hours(seconds: float) -> str:
    """
    >>> in_hours(90), in_hours(600), in_hours(7200), in_hours(864000), in_hours(1e9)
    ('90 s', '10 min', '2 h', '10 days', '11,574 days')
    """
    for unit, name, least_s in (
        (86400.0, "days", 172800.0),
        (HOUR_S, "h", 5400.0),
        (60.0, "min", 120.0),
    ):
        if seconds >= least_s:
            return (
                f"{seconds / unit:,.0f} {name}"
                if seconds >= 100 * unit
                else f"{seconds / unit:.3g} {name}"
            )
    return f"{seconds:.3g} s"
