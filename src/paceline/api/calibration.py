"""Try plans: run the best ones for a few steps on the devices here, and correct all prices by the
results.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.api.known_trials import KnownTrials
from paceline.base.errors import PacelineError
from paceline.base.logs import Tee, redirect
from paceline.cluster.cluster import Cluster
from paceline.job import Job
from paceline.launch.process.context import RankContext
from paceline.launch.process.failure import RankFailed
from paceline.planner.corrections import Calibration, Corrections
from paceline.planner.problem import PlanningProblem
from paceline.planner.program import starts_late
from paceline.planner.search import Candidate, RankedPlans
from paceline.simulate.device import refresh_device
from paceline.strategies.plan import Plan

TRY_S = 10.0  # seconds for all trials together
FEWEST_STEPS, MOST_STEPS = 4, 300
MOST_TRIALS = 3  # trials of a plan, while there is time
TURN_S = 0.5  # seconds of steps in one trial, if the prediction is right
# The same for a plan that starts late: what compiled code gains is less than other plans differ by.
FEWEST_LATE_STEPS, LATE_TURN_S = 30, 5.0
# Memory that a CPU rank holds in a run and not in a calibration, because a run writes figures and a
# last checkpoint. Measured on two small models: 1 MiB under replicas, and 4 MiB if a tensor axis is
# put together.
RUN_FOLDER_BYTES = 2 * 2**20
TIMEOUT_S = 300.0  # seconds without a sign of life, for example while a block is compiled
# The rates are looked at again if a first step takes so many times as long as they say, or as
# little.
FAR_OFF = 1.5


def try_best(
    problem: PlanningProblem,
    plans: RankedPlans,
    cluster: Cluster,
    *,
    budget_s: float,
    late_s: float = 0.0,
) -> tuple[PlanningProblem, RankedPlans]:
    """Try the most promising plans on this machine's CPUs, and correct all prices by the results.

    Trials of the same job that this machine has run in the last day count as if they were run now.
    A line on stderr says which plan is tried. If the first step shows that the devices' rates are
    out of date, these are measured again, all plans are priced again, and a line says so.

    Args:
        budget_s: See `calibrate_best`.
        late_s: See `calibrate_best`.

    Returns:
        The problem, which from now on gives corrected prices, and its plans in their new order.
    """
    known = KnownTrials.read(problem, cluster)
    spent_s, began_s = known.spent_s, time.monotonic()

    def run(plan: Plan, expected_s: float) -> Calibration:
        tried_s = spent_s + time.monotonic() - began_s
        with _progress(f"trying '{plan}' ({tried_s:.0f} of {budget_s:.0f} s)"):
            return calibrate(problem.job, cluster, plan, expected_s)

    tried = calibrate_best(
        plans,
        run,
        budget_s=budget_s - spent_s,
        late_s=late_s,
        known=known,
    )
    known.spent_s = spent_s + time.monotonic() - began_s
    if len(known.trials) > known.num_read:
        known.write()
        if (off := _off(plans, *known.trials[known.num_read])) and (
            changed := refresh_device(cluster.devices[-1].kind)
        ):
            print(f"note: {off}: {changed}", file=sys.stderr, flush=True)
            return try_best(
                problem,
                problem.search(cluster, may_relax=plans.may_relax),
                cluster,
                budget_s=budget_s,
                late_s=late_s,
            )
    return replace(problem, corrections=tried.corrections), tried.plans


def _off(plans: RankedPlans, plan: Plan, calibration: Calibration) -> str:
    """Say by how much a first real step differs from its price; empty if not by much."""
    predicted = next((each.estimate for each in plans.ranked if each.plan == plan), None)
    if predicted is None:
        return ""
    times = calibration.step_s / predicted.step_s
    if 1 / FAR_OFF < times < FAR_OFF:
        return ""
    return f"a step of '{plan}' took {times:.2g} times as long as this CPU's rates say"


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """Show a text on stderr meanwhile, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    width = shutil.get_terminal_size().columns - 1
    print(text[:width], end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Tried:
    """Plans with corrected prices."""

    plans: RankedPlans
    corrections: Corrections


def calibrate_best(
    plans: RankedPlans,
    run: Callable[[Plan, float], Calibration],
    *,
    budget_s: float,
    late_s: float = 0.0,
    known: KnownTrials | None = None,
) -> Tried:
    """Try the most promising plans and correct the prices of all plans by the results.

    The plan that looks best is calibrated and all others are corrected by it, again and again,
    until the best plan was itself calibrated. The next candidates are plans of other kinds that may
    be as fast. Then the best ones run again, because on an uneven machine one trial may say little,
    and the spread of the trials widens all intervals. Nothing else is tried.

    A plan that starts late and was not tried is left out of the ranking: what compiled code gains
    is less than prices know.

    Args:
        run: Takes a plan and its predicted step in seconds. If a plan fails, it is refused with its
            error.
        budget_s: Seconds that the trials may take. A plan is not tried if its steps are so long
            that its trial takes more than what is left.
        late_s: Seconds that the trial of a plan that starts late may take in addition.
        known: What was tried before; what is tried now is added.

    Raises:
        RankFailed: a calibration was asked to stop.
    """
    corrections, began_s = Corrections(), time.monotonic()
    predicted = {candidate.plan: candidate for candidate in (*plans.ranked, *plans.too_large)}
    known, compiled = known or KnownTrials(), plans.compiled
    for plan, calibration in known.trials:
        if plan in predicted:
            corrections.add(plan, predicted[plan].estimate, calibration)
    if corrections:
        plans = _corrected(plans, predicted, compiled, corrections)
    while (left_s := budget_s - (time.monotonic() - began_s)) > 0:
        candidate = _next(plans, corrections, left_s, late_s)
        if candidate is None:
            break
        try:
            calibration = (
                run(candidate.plan, candidate.estimate.step_s)
                if candidate.plan in corrections
                else _calibrated(candidate, run)
            )
            corrections.add(candidate.plan, predicted[candidate.plan].estimate, calibration)
            known.trials.append((candidate.plan, calibration))
        except PacelineError as error:
            if isinstance(error, RankFailed) and error.failure.is_stop:
                raise
            why = str(error).partition("\n")[0]
            plans = _without(plans, predicted.pop(candidate.plan), why)
        if corrections:
            plans = _corrected(plans, predicted, compiled, corrections)
    plans = replace(
        plans,
        ranked=[
            candidate
            for candidate in plans.ranked
            if candidate.estimate.is_measured or not candidate.estimate.start_s
        ],
    )
    return Tried(plans, corrections)


def _without(plans: RankedPlans, candidate: Candidate, why: str) -> RankedPlans:
    """Leave out a plan that failed."""
    return replace(
        plans,
        ranked=[other for other in plans.ranked if other.plan != candidate.plan],
        failed=(*plans.failed, candidate.plan),
        refused={**plans.refused, str(candidate.plan): f"it failed when it was tried: {why}"},
    )


def _trial_s(candidate: Candidate) -> float:
    """Return the seconds that a trial takes, by price."""
    step_s = candidate.estimate.step_s
    return candidate.estimate.start_s + step_s * _num_steps(candidate.plan, step_s)


def _num_steps(plan: Plan, expected_s: float) -> int:
    """Return the number of steps in a trial of a plan."""
    fewest, turn_s = FEWEST_STEPS, TURN_S
    if starts_late(plan):
        fewest, turn_s = FEWEST_LATE_STEPS, LATE_TURN_S
    return min(MOST_STEPS, max(fewest, round(turn_s / expected_s)))


def _calibrated(candidate: Candidate, run: Callable[[Plan, float], Calibration]) -> Calibration:
    """Calibrate a plan; if it is slower than its interval, try it again and keep the faster result.

    The faster result is better because other users of the machine only make steps slower.
    """
    first = run(candidate.plan, candidate.estimate.step_s)
    if first.step_s <= candidate.estimate.high_s:
        return first
    second = run(candidate.plan, candidate.estimate.step_s)
    return min(first, second, key=lambda each: each.step_s)


def _next(
    plans: RankedPlans, corrections: Corrections, left_s: float, late_s: float
) -> Candidate | None:
    """Return the plan to try next; None if no trial is left for which there is time.

    The order is:

    1. the fastest plan that may be chosen, until it was calibrated;
    2. plans that may be as fast as it: one of each other kind, then calibrated ones again.

    A plan that starts late, because its code is compiled, is only tried if it is the fastest one.
    """
    fastest = min(
        (rival.estimate for rival in plans.rivals if rival.plan in corrections),
        default=None,
        key=lambda estimate: estimate.step_s,
    )
    rivals = [
        rival
        for rival in plans.rivals
        if _trial_s(rival) <= max(left_s, late_s if rival.estimate.start_s else 0.0)
    ]
    if (
        rivals
        and rivals[0].plan not in corrections
        and (fastest is None or rivals[0].estimate.step_s < fastest.step_s)
    ):
        return rivals[0]
    as_fast = [
        rival
        for rival in rivals
        if not rival.estimate.start_s
        and (fastest is None or rival.estimate.low_s <= fastest.high_s)
    ]
    return _of_another_kind(as_fast, corrections) or _again(as_fast, corrections)


def _of_another_kind(candidates: Sequence[Candidate], corrections: Corrections) -> Candidate | None:
    return next(
        (candidate for candidate in candidates if not corrections.knows_kind_of(candidate.plan)),
        None,
    )


def _again(candidates: Sequence[Candidate], corrections: Corrections) -> Candidate | None:
    """Return the calibrated plan that was tried least often; None if all had enough trials."""
    return min(
        (
            candidate
            for candidate in candidates
            if 0 < corrections.num_trials(candidate.plan) < MOST_TRIALS
        ),
        default=None,
        key=lambda candidate: corrections.num_trials(candidate.plan),
    )


def _corrected(
    plans: RankedPlans,
    predicted: dict[Plan, Candidate],
    compiled: Sequence[Candidate],
    corrections: Corrections,
) -> RankedPlans:
    """Return the plans with corrected prices, given the prices without any correction."""

    def corrected(candidate: Candidate) -> Candidate:
        return replace(candidate, estimate=corrections.apply(candidate.plan, candidate.estimate))

    new = {plan: corrected(candidate) for plan, candidate in predicted.items()}
    return replace(
        plans,
        ranked=sorted(
            (candidate for candidate in new.values() if candidate.estimate.fits),
            key=lambda candidate: (candidate.step_cost, str(candidate.plan)),
        ),
        too_large=[candidate for candidate in new.values() if not candidate.estimate.fits],
        compiled=tuple(map(corrected, compiled)),
    )


def calibrate(job: Job, cluster: Cluster, plan: Plan, expected_s: float) -> Calibration:
    """Run a few steps of a plan on the cluster's first devices, as `train` would; nothing is
    written.

    Args:
        expected_s: Predicted seconds of a step; they decide how many steps are taken.

    Raises:
        RankFailed: a rank failed.
    """
    from paceline.launch.local.ranks import run_local
    from paceline.planner.devices import devices_of
    from paceline.planner.rank_kinds import split_shares
    from paceline.strategies.compose import load
    from paceline.training.drivers import fault_policy, train_rank
    from paceline.training.settings import Settings

    load(plan)
    began_s, num_steps = time.monotonic(), _num_steps(plan, expected_s)
    short = replace(job.with_training_only(), steps=num_steps, epochs=None)
    used = replace(cluster, devices=cluster.devices[: plan.world_size])
    settings = Settings(
        run_dir=None, is_trial=True, shares=split_shares(plan, used), devices=devices_of(plan, used)
    )

    def body(context: RankContext) -> Any:
        gc.enable()  # as in a run: plans are tried while this process plans without the collector
        _be_silent()
        return train_rank(context, short, plan, settings)

    # under servers these are rank 0's
    figures = run_local(body, used.devices, timeout_s=TIMEOUT_S, fault_policy=fault_policy(plan))[0]
    beyond = RUN_FOLDER_BYTES if used.devices[0].kind == "cpu" else 0
    step_s, wall_s = figures["later_step_s"], time.monotonic() - began_s
    return Calibration(
        step_s, figures["peak_memory_bytes"] + beyond, max(0.0, wall_s - num_steps * step_s)
    )


def _be_silent() -> None:
    """Discard all that this rank prints from now on, also by its stream to the terminal."""
    if isinstance(sys.stderr, Tee):
        sys.stderr.terminal = None
    redirect(None)
