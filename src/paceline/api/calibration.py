"""Calibrate plans: run some of them briefly on the devices here, and correct their prices."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.api.ab_timing import (
    FEWEST_PAIRS,
    WARM_UP_PAIRS,
    AlternatingSteps,
    Pair,
    StepSeconds,
    gain,
    more_pairs,
    start_s,
)
from paceline.base.errors import PacelineError
from paceline.base.logs import Tee
from paceline.cluster.cluster import Cluster
from paceline.job import Job
from paceline.launch.process.context import RankContext
from paceline.launch.process.failure import RankFailed
from paceline.planner.corrections import Calibration, Corrections
from paceline.planner.search import Candidate, RankedPlans
from paceline.strategies.plan import Plan

FEWEST_STEPS, MOST_STEPS = 12, 300
MOST_TRIALS = 3  # trials of a plan, while there is time
TURN_S = 1.0  # seconds of steps in one calibration, if the prediction is right
# The same for a plan that starts late, whose steps run in turns with and without the late part.
FEWEST_IN_TURNS, IN_TURNS_S, MOST_IN_TURNS_S = 30, 10.0, 60.0
# Memory that a CPU rank holds in a run and not in a calibration, because a run writes figures and a
# last checkpoint. Measured on two small models: 1 MiB under replicas, and 4 MiB if a tensor axis is
# put together.
RUN_FOLDER_BYTES = 2 * 2**20
TIMEOUT_S = 300.0  # seconds without a sign of life, for example while a block is compiled


def calibrate_best(
    plans: RankedPlans,
    run: Callable[[Plan, float], Calibration],
    *,
    budget_s: float,
    worth: float = math.inf,
) -> RankedPlans:
    """Try the most promising plans and correct the prices of all plans by the results.

    The plan that looks best is calibrated and all others are corrected by it, again and again,
    until the best plan was itself calibrated. The next candidates are plans of other kinds that may
    be as fast. Then the best ones run again, because on an uneven machine one trial may say little,
    and the spread of the trials widens all intervals. Last come plans of kinds that look slower,
    and plans that have many more or fewer micro-batches than a calibrated plan of their kind.

    Args:
        run: Takes a plan and its predicted step in seconds. If a plan fails, it is refused with its
            error.
        budget_s: Seconds that the trials may take.
        worth: Plans are not tried if their predicted step is more than this many times the best
            plan's step.

    Raises:
        RankFailed: a calibration was asked to stop.
    """
    corrections, began_s = Corrections(), time.monotonic()
    predicted = {candidate.plan: candidate for candidate in (*plans.ranked, *plans.too_large)}
    while time.monotonic() - began_s < budget_s:
        candidate = _next(plans, corrections, worth)
        if candidate is None:
            break
        try:
            calibration = (
                run(candidate.plan, candidate.estimate.step_s)
                if candidate.plan in corrections
                else _calibrated(candidate, run)
            )
            corrections.add(candidate.plan, predicted[candidate.plan].estimate, calibration)
        except PacelineError as error:
            if isinstance(error, RankFailed) and error.failure.is_stop:
                raise
            plans.refused[str(candidate.plan)] = (
                f"it failed when it was tried: {str(error).partition(chr(10))[0]}"
            )
            predicted.pop(candidate.plan)
        plans = _corrected(plans, predicted, corrections)
    return plans


def _calibrated(candidate: Candidate, run: Callable[[Plan, float], Calibration]) -> Calibration:
    """Calibrate a plan; if it is slower than its interval, try it again and keep the faster result.

    The faster result is better because other users of the machine only make steps slower.
    """
    first = run(candidate.plan, candidate.estimate.step_s)
    if first.step_s <= candidate.estimate.high_s:
        return first
    second = run(candidate.plan, candidate.estimate.step_s)
    return min(first, second, key=lambda each: each.step_s)


def _next(plans: RankedPlans, corrections: Corrections, worth: float) -> Candidate | None:
    """Return the plan to try next; None if no trial is left.

    The order is:

    1. the fastest exact plan, until it was calibrated;
    2. exact plans that may be as fast as it: one of each other kind, then calibrated ones again;
    3. all plans, exact ones first: one of each other kind, then those that are far from any
       calibrated plan, then the calibrated ones again.

    A plan that starts late, because its code is compiled, is only tried if it is the fastest one.
    """
    exact = [candidate for candidate in plans.ranked if candidate.plan.relaxed is None]
    fastest = min(
        (candidate.estimate for candidate in exact if candidate.plan in corrections),
        default=None,
        key=lambda estimate: estimate.step_s,
    )
    if (
        exact
        and exact[0].plan not in corrections
        and (fastest is None or exact[0].estimate.step_s < fastest.step_s)
    ):
        return exact[0]
    worthy = [
        candidate
        for candidate in (*exact, *plans.ranked)
        if not candidate.estimate.start_s
        and (fastest is None or candidate.estimate.step_s <= worth * fastest.step_s)
    ]
    rivals = [
        candidate
        for candidate in worthy
        if candidate.plan.relaxed is None
        and (fastest is None or candidate.estimate.low_s <= fastest.high_s)
    ]
    return (
        _of_another_kind(rivals, corrections)
        or _again(rivals, corrections)
        or _of_another_kind(worthy, corrections)
        or next((candidate for candidate in worthy if corrections.is_far(candidate.plan)), None)
        or _again(worthy, corrections)
    )


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
    plans: RankedPlans, predicted: dict[Plan, Candidate], corrections: Corrections
) -> RankedPlans:
    corrected = [
        replace(candidate, estimate=corrections.apply(plan, candidate.estimate))
        for plan, candidate in predicted.items()
    ]
    ranked = sorted(
        (candidate for candidate in corrected if candidate.estimate.fits),
        key=lambda candidate: (candidate.step_cost, str(candidate.plan)),
    )
    too_large = [candidate for candidate in corrected if not candidate.estimate.fits]
    return replace(plans, ranked=ranked, too_large=too_large)


@dataclass(frozen=True, slots=True)
class _Trial:
    """The result of a few steps of a plan."""

    step_s: float
    peak_memory_bytes: int
    wall_s: float  # for everything, including the start of ranks
    num_steps: int
    pairs: Sequence[Pair]  # steps with and without a part of the plan, in turns


def calibrate(job: Job, cluster: Cluster, plan: Plan, expected_s: float) -> Calibration:
    """Run a few steps of a plan on the cluster's first devices, as `train` would; nothing is
    written.

    A plan that starts late omits the part that makes it late in every other step, because what that
    part gains is less than the difference between two runs. The trial takes as many steps as it
    needs to know the gain.

    Args:
        expected_s: Predicted seconds of a step; they decide how many steps are taken.

    Raises:
        RankFailed: a rank failed.
    """
    from paceline.planner.program import starts_late
    from paceline.strategies.compose import load
    from paceline.training.drivers import fault_policy

    load(plan)
    is_late = starts_late(plan) and fault_policy(plan).uses_process_group
    fewest, turn_s = (FEWEST_IN_TURNS, IN_TURNS_S) if is_late else (FEWEST_STEPS, TURN_S)
    trial = _tried(
        job,
        cluster,
        plan,
        min(MOST_STEPS, max(fewest, round(turn_s / expected_s))),
        in_turns=is_late,
    )
    if len(trial.pairs) < WARM_UP_PAIRS + FEWEST_PAIRS:
        return Calibration(
            trial.step_s,
            trial.peak_memory_bytes,
            max(0.0, trial.wall_s - trial.num_steps * trial.step_s),
        )
    warm = list(trial.pairs[WARM_UP_PAIRS:])
    room = round(MOST_IN_TURNS_S / (2 * trial.step_s)) - len(warm)
    if (more := min(more_pairs(warm), room)) > 0:
        second = _tried(job, cluster, plan, 2 * (WARM_UP_PAIRS + more), in_turns=True)
        warm += second.pairs[WARM_UP_PAIRS:]
    gained = gain(warm)
    # The mean step is the mean of every other step, which has the gain.
    return Calibration(
        trial.step_s - gained.seconds / 2, trial.peak_memory_bytes, start_s(trial.pairs), gained
    )


def _tried(job: Job, cluster: Cluster, plan: Plan, num_steps: int, *, in_turns: bool) -> _Trial:
    from paceline.launch.local.ranks import run_local
    from paceline.planner.devices import devices_of
    from paceline.planner.rank_kinds import split_shares
    from paceline.training.drivers import fault_policy, train_rank
    from paceline.training.settings import Settings

    began_s = time.monotonic()
    short = replace(job.with_training_only(), steps=num_steps, epochs=None)
    used = replace(cluster, devices=cluster.devices[: plan.world_size])
    settings = Settings(
        run_dir=None, is_trial=True, shares=split_shares(plan, used), devices=devices_of(plan, used)
    )

    def body(context: RankContext) -> Any:
        turns = AlternatingSteps() if in_turns else None
        with _silence():
            figures = train_rank(context, short, plan, replace(settings, observer=turns))
        pairs = [asdict(pair) for pair in turns.pairs()] if turns is not None else []
        # under servers these are rank 0's
        return None if figures is None else {**figures, "pairs": pairs}

    figures = run_local(body, used.devices, timeout_s=TIMEOUT_S, fault_policy=fault_policy(plan))[0]
    beyond = RUN_FOLDER_BYTES if used.devices[0].kind == "cpu" else 0
    pairs = [
        Pair(StepSeconds(**pair["with_all"]), StepSeconds(**pair["without"]))
        for pair in figures["pairs"]
    ]
    return _Trial(
        figures["later_step_s"],
        figures["peak_memory_bytes"] + beyond,
        time.monotonic() - began_s,
        num_steps,
        pairs,
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard everything that this process prints.

    Rank 0's own stream writes to the terminal through another file descriptor, so it is silenced
    separately.
    """
    saved_descriptors = {number: os.dup(number) for number in (1, 2)}
    own_stream = sys.stderr if isinstance(sys.stderr, Tee) else None
    terminal = own_stream.terminal if own_stream is not None else None
    with open(os.devnull, "w") as nowhere:
        for number in saved_descriptors:
            os.dup2(nowhere.fileno(), number)
    if own_stream is not None:
        own_stream.terminal = io.StringIO()
    try:
        yield
    finally:
        if own_stream is not None:
            own_stream.terminal = terminal
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in saved_descriptors.items():
            os.dup2(copy, number)
            os.close(copy)
