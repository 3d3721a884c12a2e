"""Correct prices by measured steps: of the parts of a step, of calibrated plans, and of plans like
them.

The price of computing, of the optimizer and of messages is wrong by one factor each, which is
nearly the same in all plans. A single rank, ranks beside each other and compiled code may each have
another factor. A bubble lasts as long as the computing that it waits for. The chosen factors are
those that explain the measured steps best. The time that a calibrated plan takes beyond them is
shown as unexplained in the breakdown. A plan that runs the same code on as many ranks gets the same
remaining factor on its time and the same bytes on its memory, interpolated by the number of
micro-batches between two calibrated plans. Any other plan gets the correction of the plans that are
most like it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from paceline.planner.estimate import Estimate
from paceline.planner.rank_kinds import MemoryNeed
from paceline.planner.search import kind_of
from paceline.planner.space import uncompiled_variant
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.plan import Plan

# Half the width of an 80 % interval around a step's time, as a natural logarithm: for a calibrated
# plan, for a plan of a calibrated kind, and for others. Fitted on `benchmarks.regret`; see
# docs/formulas.md.
SPREAD = {"itself": 0.075, "kind": 0.13, "nothing": 0.5}
# The standard deviation of the logarithm of a calibrated step in the runs of that fit, including
# that of a second run. It counts as many trials as `NOISE_TRIALS`, beside those of plans that were
# tried again.
NOISE = SPREAD["itself"] / 1.28 / math.sqrt(2)
NOISE_TRIALS = 4
UNEXPLAINED = "unexplained"  # part of a breakdown: measured time beyond all parts together
# Spreads of a part's factor around 1; of its factor in plans of one or several ranks around that; of
# its factor in compiled code; and of a step around the sum of its parts. Fitted on
# `benchmarks.regret`, each plan corrected by the others of its job; the value for compiled code is
# assumed.
FACTOR_SPREAD, RANKS_SPREAD, COMPILED_SPREAD, STEP_SPREAD = 1.0, 0.2, 0.5, 0.1
LEAST_FACTOR = 0.2
MEASURED = "unaccounted"  # entry of a ledger: measured memory beyond all other entries


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measurements from a few steps of a plan on the devices."""

    step_s: float  # mean of the steps
    peak_memory_bytes: int  # of the fullest rank
    # seconds that the plan takes once, as for compiling, with what ranks take to start
    start_s: float = 0.0


class Corrections:
    """The calibrations so far, with the predictions for the same plans, and the corrections from
    both.
    """

    def __init__(self) -> None:
        self._calibrations: dict[Plan, Calibration] = {}
        self._trials: dict[Plan, list[Calibration]] = {}
        self._predicted: dict[Plan, Estimate] = {}
        self._plans_by_likeness: dict[tuple[object, ...], list[Plan]] = {}
        self._changes: Mapping[Cause, float] = {}

    def __contains__(self, plan: Plan) -> bool:
        return plan in self._calibrations

    def __bool__(self) -> bool:
        """Whether any plan was calibrated."""
        return bool(self._calibrations)

    def add(self, plan: Plan, predicted: Estimate, calibration: Calibration) -> None:
        """Add a calibration. If a plan has several trials, the median of their steps counts.

        Args:
            predicted: The estimate without any correction.
        """
        for likeness in _likenesses(plan) if plan not in self else ():
            self._plans_by_likeness.setdefault(likeness, []).append(plan)
        trials = self._trials.setdefault(plan, [])
        trials.append(calibration)
        self._calibrations[plan] = replace(
            calibration,
            step_s=statistics.median(trial.step_s for trial in trials),
            peak_memory_bytes=max(trial.peak_memory_bytes for trial in trials),
        )
        self._predicted[plan] = predicted
        self._changes = cause_changes(
            [
                (causes_s(calibrated, self._predicted[calibrated].breakdown), each.step_s)
                for calibrated, each in self._calibrations.items()
            ]
        )

    def num_trials(self, plan: Plan) -> int:
        return len(self._trials.get(plan, ()))

    @property
    def noise(self) -> float:
        """The standard deviation of the logarithm of a step, between trials of a plan."""
        squares, degrees = NOISE_TRIALS * NOISE**2, NOISE_TRIALS
        for trials in self._trials.values():
            logs = [math.log(trial.step_s) for trial in trials]
            squares += sum((log - statistics.fmean(logs)) ** 2 for log in logs)
            degrees += len(logs) - 1
        return math.sqrt(squares / degrees)

    def _spread(self, plan: Plan) -> float:
        """Return half the width of the interval around a plan's step, as a logarithm.

        It includes how uneven the trials have shown this machine to be.
        """
        fitted = SPREAD[
            "itself" if plan in self else "kind" if self.knows_kind_of(plan) else "nothing"
        ]
        return math.hypot(fitted, 1.28 * math.sqrt(2 * max(0.0, self.noise**2 - NOISE**2)))

    def knows_kind_of(self, plan: Plan) -> bool:
        """Whether a plan was calibrated that runs the same code on as many ranks."""
        return _likenesses(plan)[0] in self._plans_by_likeness

    def apply(self, plan: Plan, predicted: Estimate) -> Estimate:
        """Return the corrected estimate, with an interval that says how certain it is.

        Args:
            predicted: The estimate without any correction. A calibrated plan may be predicted for
                other conditions than those of its calibration, such as other links: its error is
                assumed to stay the same.
        """
        spread = self._spread(plan)
        explained_s = self._explained_s(plan, predicted)
        error = (
            self._error_of(plan, self._predicted[plan])
            if plan in self
            else self._of_the_nearest(plan)
        )
        is_measured = plan in self and predicted == self._predicted[plan]
        step_s = self._calibrations[plan].step_s if is_measured else explained_s * error.factor
        return replace(
            predicted,
            step_s=step_s,
            low_s=step_s / math.exp(spread),
            high_s=step_s * math.exp(spread),
            peak_memory_bytes=predicted.peak_memory_bytes + error.num_bytes,
            ledger=_with(predicted.ledger, error),
            breakdown=self._breakdown(plan, predicted, step_s),
            is_measured=is_measured,
            start_s=self._start_s(plan, predicted),
            needs=tuple(
                MemoryNeed(need.name, need.device, _with(need.ledger, error))
                for need in predicted.needs
            ),
        )

    def _start_s(self, plan: Plan, predicted: Estimate) -> float:
        """Return the seconds that the plan takes once, as measured if the plan was calibrated.

        A calibration leaves compiled code in torch's cache, so the run itself starts sooner.
        """
        return (
            self._calibrations[plan].start_s
            if plan in self and predicted.start_s
            else predicted.start_s
        )

    def _parts(self, plan: Plan, predicted: Estimate) -> dict[str, float]:
        """Return the corrected seconds of a step's parts."""
        return {
            part: seconds * self._factor(plan, part)
            for part, seconds in predicted.breakdown.items()
        }

    def _factor(self, plan: Plan, part: str) -> float:
        return max(
            LEAST_FACTOR, 1 + sum(self._changes.get(cause, 0.0) for cause in _causes(plan, part))
        )

    def _explained_s(self, plan: Plan, predicted: Estimate) -> float:
        """Return the seconds of a step according to its corrected parts."""
        before_s = sum(predicted.breakdown.values())
        return (
            predicted.step_s * sum(self._parts(plan, predicted).values()) / before_s
            if before_s
            else (predicted.step_s)
        )

    def _error_of(self, plan: Plan, predicted: Estimate) -> _Error:
        """Return the rest of a calibrated plan's error that its corrected parts do not explain."""
        calibration = self._calibrations[plan]
        return _Error(
            calibration.step_s / self._explained_s(plan, predicted),
            calibration.peak_memory_bytes - predicted.peak_memory_bytes,
        )

    def _of_the_nearest(self, plan: Plan) -> _Error:
        """Return the error of the plans that are most like this one; their error in memory only if
        they are of its kind.
        """
        for nearness, likeness in enumerate(_likenesses(plan)):
            if likeness in self._plans_by_likeness:
                errors = {
                    other: self._error_of(other, self._predicted[other])
                    for other in self._plans_by_likeness[likeness]
                }
                if nearness == 0:
                    return _between(errors, plan)
                factor = statistics.geometric_mean(error.factor for error in errors.values())
                return _Error(
                    factor,
                    round(statistics.median(error.num_bytes for error in errors.values()))
                    if nearness < 3
                    else 0,
                )
        return _Error(1.0, 0)

    def _breakdown(self, plan: Plan, predicted: Estimate, step_s: float) -> dict[str, float]:
        """Return the corrected parts, and the rest of the step as unexplained."""
        parts = self._parts(plan, predicted)
        known_s = sum(parts.values())
        if known_s >= step_s:
            return {name: seconds * step_s / known_s for name, seconds in parts.items()}
        return {**parts, UNEXPLAINED: step_s - known_s}


class Cause(NamedTuple):
    """A reason why the predicted seconds of a part may be wrong in many plans."""

    part: str
    # the plans that it concerns
    among: Literal["all", "alone", "beside others", "compiled"] = "all"


def causes_s(plan: Plan, breakdown: Mapping[str, float]) -> dict[Cause, float]:
    """Return the predicted seconds of a plan's step that each cause would change."""
    seconds_by_cause: dict[Cause, float] = {}
    for part, seconds in breakdown.items():
        for cause in _causes(plan, part):
            seconds_by_cause[cause] = seconds_by_cause.get(cause, 0.0) + seconds
    return seconds_by_cause


def _causes(plan: Plan, part: str) -> Iterator[Cause]:
    part = "compute" if part == "bubble" else part
    yield Cause(part)
    yield Cause(part, "alone" if plan.world_size == 1 else "beside others")
    if part == "compute" and uncompiled_variant(plan) != plan:
        yield Cause(part, "compiled")


def cause_changes(steps: Sequence[tuple[Mapping[Cause, float], float]]) -> dict[Cause, float]:
    """Return by which part of itself each cause changes the predicted seconds, to come nearest to
    the measured steps.

    This is a least-squares fit of the remaining error as a part of each step. Changes stay near 0
    unless the steps contradict that.

    Args:
        steps: Pairs of the predicted seconds that each cause would change, and the measured
            seconds.

    >>> compute, messages = Cause("compute"), Cause("communication")
    >>> steps = [({compute: 2.0}, 3.0), ({compute: 1.0, messages: 1.0}, 2.5)]
    >>> changes = cause_changes(steps)
    >>> [round(changes[cause], 2) for cause in (compute, messages)]
    [0.49, 0.01]
    """
    import numpy as np

    spreads = {
        "all": FACTOR_SPREAD,
        "compiled": COMPILED_SPREAD,
        "alone": RANKS_SPREAD,
        "beside others": RANKS_SPREAD,
    }

    causes = sorted({cause for seconds_by_cause, _ in steps for cause in seconds_by_cause})
    whole = np.array(
        [
            sum(seconds for cause, seconds in seconds_by_cause.items() if cause.among == "all")
            for seconds_by_cause, _ in steps
        ]
    )
    measured = np.array([step_s for _, step_s in steps])
    rows = (
        np.array(
            [
                [seconds_by_cause.get(cause, 0.0) for cause in causes]
                for seconds_by_cause, _ in steps
            ]
        )
        / measured[:, None]
    )
    weights = np.diag([(STEP_SPREAD / spreads[cause.among]) ** 2 for cause in causes])
    changes = np.linalg.solve(rows.T @ rows + weights, rows.T @ (1 - whole / measured))
    return {cause: float(change) for cause, change in zip(causes, changes, strict=True)}


@dataclass(frozen=True, slots=True)
class _Error:
    """The remaining error of an estimate."""

    factor: float  # by which a step is longer
    num_bytes: int  # by which a peak is higher


def _between(errors: Mapping[Plan, _Error], plan: Plan) -> _Error:
    """Interpolate between calibrated plans, over the logarithm of the number of micro-batches.

    Beyond the first and the last calibrated plan, the error is constant.
    """

    def log_count(calibrated: Plan) -> float:
        return math.log(calibrated.num_microbatches)

    below = [calibrated for calibrated in errors if log_count(calibrated) <= log_count(plan)]
    above = [calibrated for calibrated in errors if log_count(calibrated) >= log_count(plan)]
    low = max(below, key=log_count, default=min(above, key=log_count, default=plan))
    high = min(above, key=log_count, default=low)
    width = log_count(high) - log_count(low)
    part = (log_count(plan) - log_count(low)) / width if width > 0 else 0.0
    first, second = errors[low], errors[high]
    return _Error(
        first.factor ** (1 - part) * second.factor**part,
        round((1 - part) * first.num_bytes + part * second.num_bytes),
    )


@lru_cache(maxsize=4096)  # asked for each plan after each trial
def _likenesses(plan: Plan) -> tuple[tuple[object, ...], ...]:
    """Return the groups of similar plans that a plan belongs to, from plans that run the same code
    to all plans.
    """
    kind, ranks = kind_of(plan), plan.world_size
    code = tuple((strategy.name, strategy.code(plan)) for strategy in ActivePlan(plan).strategies)
    return (kind, ranks, code), (kind, ranks), (kind,), ()


def _with(ledger: Mapping[str, int], error: _Error) -> dict[str, int]:
    return {**ledger, MEASURED: error.num_bytes} if error.num_bytes else dict(ledger)
