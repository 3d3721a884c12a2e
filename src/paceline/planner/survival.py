"""A way in which a run outlives failures, and the figures of a run that its cost depends on."""

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
)
from paceline.simulate.outages import Outages
from paceline.strategies.plan import Plan

SurvivalName = Literal["copies", "checkpoint", "fewer", "spare", "resume"]
REPAIR_HOURS = 1.0  # default time until a host that failed is back; a guess
# rate of one core, to memory that it has used before; measured on two cores
COPIED_BYTES_PER_S = 6.5e9


@dataclass(frozen=True, slots=True)
class FailureRates:
    """The failure rate of devices, and the speed of repairs and checkpoints.

    Raises:
        UsageError: a figure is not above 0.
    """

    mtbf_hours: float  # mean time between failures of one device
    repair_hours: float = REPAIR_HOURS  # until a host that failed is back
    # bytes that one device writes, and reads; all write their part at the same time
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
        """The mean time between failures of all devices together."""
        return self.rates.mtbf_hours * HOUR_S / self.plan.world_size

    @property
    def num_savers(self) -> int:
        return self.plan.sync.num_savers(self.plan.axes)

    @cached_property
    def state_bytes(self) -> int:
        """The size of a checkpoint."""
        return sum((p.num_bytes + p.state_bytes) * p.count for p in self.problem.profile.parameters)

    @property
    def bytes_per_s(self) -> float:
        """The rate at which all ranks that hold the state write or read it together."""
        return self.num_savers * self.rates.checkpoint_bytes_per_s

    @property
    def copied_s(self) -> float:
        """The seconds that training waits at a checkpoint."""
        return max(self.state_bytes / self.num_savers / COPIED_BYTES_PER_S, 1e-3)

    @property
    def read_s(self) -> float:
        """The seconds to read a checkpoint."""
        return max(self.state_bytes / self.bytes_per_s, 1e-3)

    def saving(self, restart_s: float) -> tuple[Failures, float]:
        """Return the figures of a run that goes on from the newest checkpoint, with its best
        interval in seconds.

        The interval is at least one step.
        """
        saving = Failures(
            self.mtbf_s,
            self.copied_s + self.read_s,
            restart_s + self.read_s,
            blocked_s=self.copied_s,
        )
        return saving, max(daly_interval_s(saving), self.step_s)

    @cached_property
    def resumed_s(self) -> float:
        """The seconds lost to resuming a run that ended without a checkpoint of its last step."""
        saving, interval_s = self.saving(RESTART_S)
        return saving.restart_s + interval_s / 2


class NoSurvival(Exception):
    """A way does not exist for this plan on this cluster; the message says why."""


def fitting_step_s(run: FailingRun, plan: Plan) -> float:
    """Return the seconds of a step of another plan on the first devices.

    Raises:
        NoSurvival: the plan can't be there, or does not fit.
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
    """A way in which a run outlives failures, and what failures cost the run then."""

    name: SurvivalName
    words: str  # what happens, for people
    failures: Failures
    # seconds of work between copies or checkpoints, or of a step if ranks leave their state in
    # memory
    interval_s: float
    goodput: float  # the useful part of the time of all devices that the run has
    # options of the command, and what else is specific to this way, for `--json`
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
        """Compute the goodput of a way.

        Args:
            used: The part of all devices that trains in an undisturbed run; it is below 1 if spares
                wait.
        """
        lasting = goodput(failures, interval_s, outages)
        return cls(name, words, failures, interval_s, used * lasting, options or {})

    def to_dict(self) -> dict[str, Any]:
        """Return the way for `--json`."""
        return {
            "restart_s": self.failures.restart_s,
            "blocked_s": self.failures.waited_s,
            "write_s": self.failures.write_s,
            "interval_s": self.interval_s,
            "goodput": self.goodput,
            **self.options,
        }

    def describe(self) -> str:
        return (
            f"{self.words}: {100 * self.goodput:.1f} % is progress, going back to at most "
            f"{in_hours(self.interval_s)} of work, {self.failures.restart_s:.3g} s after the failure"
        )


def in_hours(seconds: float) -> str:
    """Return seconds as text in a suitable unit.

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
