"""Corrects prices by steps that were really taken: of the parts of a step, of calibrated plans, and of plans like them.

Computing, the optimizer and messages are each off by a factor, nearly the same in all plans: a rank alone, ranks beside
each other and compiled code may each differ from it. A bubble is as long as the computing that it waits for. The
factors are those that explain the measured steps best. What a calibrated plan takes beyond them is not explained, and
the breakdown says so. A plan that runs the same code on as many ranks gets the same remaining factor on its time and
the same bytes on its memory, interpolated by the number of micro-batches between two calibrated plans. Any other plan
gets the correction of the plans that are most like it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from paceline.planner.break_even import Gain
from paceline.planner.estimate import Estimate
from paceline.planner.rank_kinds import MemoryNeed
from paceline.planner.search import kind_of
from paceline.planner.space import uncompiled_variant
from paceline.strategies.plan import Plan
from paceline.strategies.registry import active

# Half the width of an 80 % interval around a step's time, as a natural logarithm: of a plan that was calibrated, of
# one whose kind was, and of others. Fitted on `benchmarks.regret`; see docs/formulas.md.
SPREAD = {"itself": 0.075, "kind": 0.13, "nothing": 0.25}
# The standard deviation of the logarithm of a step that was calibrated with which those were fitted, a second run's in
# it; and how many trials that counts for, beside those of the plans that were tried again.
NOISE = SPREAD["itself"] / 1.28 / math.sqrt(2)
NOISE_TRIALS = 4
FAR = 4  # times as many micro-batches, or as few, from which a plan of the same kind is worth a calibration of its own
UNEXPLAINED = "unexplained"  # of a breakdown: what was measured above all parts together
# How far a part's factor is from 1, and how far its factor in plans of one rank and of several is from it, as parts of
# the half width of the prices' intervals; how far it is in compiled code; how far a step is from its parts' sum. Fitted
# on `benchmarks.regret`, each plan corrected by the others of its job; that of compiled code is assumed.
FACTOR_SPREAD, RANKS_SPREAD, COMPILED_SPREAD, STEP_SPREAD = 0.25, 0.05, 0.5, 0.1
LEAST_FACTOR = 0.2
MEASURED = "unaccounted"  # of a ledger: what was measured above everything that is accounted for


@dataclass(frozen=True, slots=True)
class Calibration:
    """A few steps of a plan on the devices: the mean step, the fullest rank's peak, and seconds that it took
    once, as for compiling; of ranks without a process group with what they take to start.

    gain: by which a step of compiled code is shorter than one of the blocks' own, of steps in turns; None where code is
        not compiled.
    """

    step_s: float
    peak_memory_bytes: int
    start_s: float = 0.0
    gain: Gain | None = None


class Corrections:
    """Calibrations beside what had been predicted for them."""

    def __init__(self) -> None:
        self._calibrations: dict[Plan, Calibration] = {}
        self._trials: dict[Plan, list[Calibration]] = {}
        self._predicted: dict[Plan, Estimate] = {}
        self._plans_by_likeness: dict[tuple[object, ...], list[Plan]] = {}
        self._changes: Mapping[Cause, float] = {}

    def __contains__(self, plan: Plan) -> bool:
        return plan in self._calibrations

    def add(self, plan: Plan, predicted: Estimate, calibration: Calibration) -> None:
        """Of several trials of a plan the median step counts. predicted: without any correction."""
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
            ],
            prices_spread=statistics.fmean(map(_spread_of, self._predicted.values())),
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
        """Half the width of the interval around a plan's step, on a machine as uneven as trials show it to be."""
        fitted = SPREAD[
            "itself" if plan in self else "kind" if self.knows_kind_of(plan) else "nothing"
        ]
        return math.hypot(fitted, 1.28 * math.sqrt(2 * max(0.0, self.noise**2 - NOISE**2)))

    def knows_kind_of(self, plan: Plan) -> bool:
        """Whether a plan was calibrated that runs the same code on as many ranks."""
        return _likenesses(plan)[0] in self._plans_by_likeness

    def is_far(self, plan: Plan) -> bool:
        """Whether all of its kind that were calibrated have many more or many fewer micro-batches."""
        calibrated = self._plans_by_likeness.get(_likenesses(plan)[0], ())
        return all(
            max(
                plan.num_microbatches / other.num_microbatches,
                other.num_microbatches / plan.num_microbatches,
            )
            >= FAR
            for other in calibrated
        )

    def apply(self, plan: Plan, predicted: Estimate) -> Estimate:
        """The estimate with what is known of plans like it, and how sure that is."""
        spread = self._spread(plan)
        explained_s = self._explained_s(plan, predicted)
        error = self._error_of(plan, predicted) if plan in self else self._of_the_nearest(plan)
        step_s = self._step_s(plan) if plan in self else explained_s * error.factor
        return replace(
            predicted,
            step_s=step_s,
            low_s=step_s / math.exp(spread),
            high_s=step_s * math.exp(spread),
            peak_memory_bytes=predicted.peak_memory_bytes + error.num_bytes,
            ledger=_with(predicted.ledger, error),
            breakdown=self._breakdown(plan, predicted, step_s),
            is_measured=plan in self,
            start_s=self._start_s(plan, predicted),
            gain=self._calibrations[plan].gain if plan in self else predicted.gain,
            needs=tuple(
                MemoryNeed(need.name, need.device, _with(need.ledger, error))
                for need in predicted.needs
            ),
        )

    def _step_s(self, plan: Plan) -> float:
        """Two runs of one plan differ by more than compiled code may gain: where both plans were calibrated, the gain
        that was found in turns counts, and one that is not sure does not."""
        calibration = self._calibrations[plan]
        plain = self._calibrations.get(uncompiled_variant(plan))
        if calibration.gain is None or plain is None:
            return calibration.step_s
        gain = calibration.gain
        return plain.step_s - (gain.seconds if gain.is_sure else min(0.0, gain.seconds))

    def _start_s(self, plan: Plan, predicted: Estimate) -> float:
        """A calibration leaves compiled code in torch's cache, so that a run starts sooner than it did."""
        return (
            self._calibrations[plan].start_s
            if plan in self and predicted.start_s
            else predicted.start_s
        )

    def _parts(self, plan: Plan, predicted: Estimate) -> dict[str, float]:
        """Seconds of a step's parts, as they were found to be."""
        return {
            part: seconds * self._factor(plan, part)
            for part, seconds in predicted.breakdown.items()
        }

    def _factor(self, plan: Plan, part: str) -> float:
        return max(
            LEAST_FACTOR, 1 + sum(self._changes.get(cause, 0.0) for cause in _causes(plan, part))
        )

    def _explained_s(self, plan: Plan, predicted: Estimate) -> float:
        """The step that parts explain, as they were found to be."""
        before_s = sum(predicted.breakdown.values())
        return (
            predicted.step_s * sum(self._parts(plan, predicted).values()) / before_s
            if before_s
            else (predicted.step_s)
        )

    def _error_of(self, plan: Plan, predicted: Estimate) -> _Error:
        """What is left of a calibrated plan's error beside that of its parts."""
        calibration = self._calibrations[plan]
        return _Error(
            calibration.step_s / self._explained_s(plan, predicted),
            calibration.peak_memory_bytes - predicted.peak_memory_bytes,
        )

    def _of_the_nearest(self, plan: Plan) -> _Error:
        """What the plans that are most like this one are off by; their memory only if they are of its kind."""
        for nearness, likeness in enumerate(_likenesses(plan)):
            if likeness in self._plans_by_likeness:
                errors = {
                    other: self._error_of(other, self._predicted[other])
                    for other in self._plans_by_likeness[likeness]
                }
                if nearness == 0:
                    return _between(errors, plan)
                factor = statistics.geometric_mean(error.factor for error in errors.values())
                # The surer prices are, the less one plan's error says of another kind.
                part = min(1.0, FACTOR_SPREAD * _spread_of(self._predicted[next(iter(errors))]))
                return _Error(
                    factor**part,
                    round(statistics.median(error.num_bytes for error in errors.values()))
                    if nearness < 3
                    else 0,
                )
        return _Error(1.0, 0)

    def _breakdown(self, plan: Plan, predicted: Estimate, step_s: float) -> dict[str, float]:
        """Parts as they were found to be; what a step takes beyond them is not explained."""
        parts = self._parts(plan, predicted)
        known_s = sum(parts.values())
        if known_s >= step_s:
            return {name: seconds * step_s / known_s for name, seconds in parts.items()}
        return {**parts, UNEXPLAINED: step_s - known_s}


class Cause(NamedTuple):
    """Why predicted seconds of some part may be wrong in many plans. among: only in these plans."""

    part: str
    among: Literal["all", "alone", "beside others", "compiled"] = "all"


def _spread_of(predicted: Estimate) -> float:
    """Half the width of its interval."""
    return math.log(predicted.high_s / predicted.low_s) / 2


def causes_s(plan: Plan, breakdown: Mapping[str, float]) -> dict[Cause, float]:
    """The predicted seconds of a plan's step that each cause would change."""
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


def cause_changes(
    steps: Sequence[tuple[Mapping[Cause, float], float]], *, prices_spread: float
) -> dict[Cause, float]:
    """By how much of itself each cause makes predicted seconds longer, so that steps come nearest to what was measured.

    Least squares of what is left, as a part of each step; changes stay near 0 where nothing speaks against it.

    steps: (predicted seconds that each cause would change, measured seconds).
    prices_spread: half the width of the prices' intervals; the surer prices are, the less steps change them.

    >>> compute, messages = Cause("compute"), Cause("communication")
    >>> steps = [({compute: 2.0}, 3.0), ({compute: 1.0, messages: 1.0}, 2.5)]
    >>> [[round(changes[cause], 2) for cause in (compute, messages)]
    ...  for changes in (cause_changes(steps, prices_spread=spread) for spread in (4.0, 0.4))]
    [[0.49, 0.01], [0.18, 0.04]]
    """
    import numpy as np

    spreads = {
        "all": FACTOR_SPREAD * prices_spread,
        "compiled": COMPILED_SPREAD,
        "alone": RANKS_SPREAD * prices_spread,
        "beside others": RANKS_SPREAD * prices_spread,
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
    """By what a step is longer, as a factor, and a peak higher."""

    factor: float
    num_bytes: int


def _between(errors: Mapping[Plan, _Error], plan: Plan) -> _Error:
    """A line through what is known, over the logarithm of the number of micro-batches; level beyond its ends."""

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


def _likenesses(plan: Plan) -> tuple[tuple[object, ...], ...]:
    """What a plan shares with others, from plans that run the same code to all plans."""
    kind, ranks = kind_of(plan), plan.world_size
    code = tuple((strategy.name, strategy.code(plan)) for strategy in active(plan))
    return (kind, ranks, code), (kind, ranks), (kind,), ()


def _with(ledger: Mapping[str, int], error: _Error) -> dict[str, int]:
    return {**ledger, MEASURED: error.num_bytes} if error.num_bytes else dict(ledger)
