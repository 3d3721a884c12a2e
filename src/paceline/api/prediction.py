"""Compare the prediction for a run with what the run measured."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.api.links import with_links
from paceline.base.errors import PacelineError, PlanError, in_words
from paceline.base.fork import in_a_fork
from paceline.base.tables import in_mib, in_ms, three_digits
from paceline.cluster.accelerators import has_gpus
from paceline.cluster.gpu_use import apart_from_cuda
from paceline.job import Job
from paceline.planner.resolve import Resolved
from paceline.runs import folder
from paceline.simulate.device import refresh_device

if TYPE_CHECKING:
    from paceline.api.plan_choice import PlanChoice
    from paceline.launch.process.heartbeats import HeartbeatTable
    from paceline.model.cost.profile import Profile
    from paceline.planner.estimate import Estimate
    from paceline.planner.pieces import LazyPieces
    from paceline.planner.problem import PlanningProblem

FEW_STEPS = 10  # a run of fewer steps is mostly start-up
# The deviation of a peak that is not reported: as a part of it, and at least in bytes.
MEMORY_SPREAD, SMALL_BYTES = (
    0.15,
    20 * 2**20,
)


@dataclass(frozen=True)
class Priced:
    """A job's cost, as far as it is known before it runs."""

    job: Job
    resolved: Resolved
    snapshot: bool
    profile: Profile | None = None
    pieces: LazyPieces | None = None
    chosen: PlanChoice | None = None  # if the planner has made the choice
    problem: str = ""  # why there is no price

    def planning(self) -> PlanningProblem | None:
        """Return the job with its cost; None if nothing is known of it."""
        from paceline.planner.pieces import LazyPieces
        from paceline.planner.problem import PlanningProblem

        if self.profile is None:
            return None
        pieces = self.pieces or LazyPieces(self.job, self.profile)
        return PlanningProblem(self.job, self.profile, pieces)


def price(job: Job, resolved: Resolved, chosen: PlanChoice, *, snapshot: bool) -> Priced:
    """Refuse a plan that doesn't fit, if memory has a limit: one that the user set, or a GPU's.

    Without a limit, nothing of the job runs in this process before its ranks have started, unless a
    plan was chosen.

    Raises:
        PlanError: a rank needs more memory than its device has; with the ledger and the plans that
            fit.
    """
    priced = Priced(job, resolved, snapshot, chosen.profile, chosen=chosen)
    if not any(device.is_limit or device.kind == "cuda" for device in resolved.cluster.devices):
        return priced
    if not has_gpus():
        return _checked(priced)

    def look() -> Any:
        from paceline.planner.rank_kinds import gpu_rates

        if resolved.cluster.devices[-1].kind == "cuda":
            # The result is kept for the prediction: once ranks run, a measurement would disturb
            # them.
            with suppress(RuntimeError):
                gpu_rates(resolved.cluster.devices[-1])
        checked = _checked(priced)
        return checked.problem, checked.profile

    problem, profile = in_a_fork(look)
    return replace(priced, problem=problem, profile=profile)


def _checked(priced: Priced) -> Priced:
    """Add the job's cost, and refuse a plan that doesn't fit.

    Raises:
        PlanError: see `price`.
    """
    from paceline.planner.fit import check_fits

    priced, resolved = _profiled(priced), priced.resolved
    if (planning := priced.planning()) is None:
        return priced
    try:
        check_fits(planning, resolved.plan, resolved.cluster, snapshot=priced.snapshot)
    except PlanError:
        raise
    except Exception as error:  # pricing runs pieces of the model on fake tensors
        return _without_price(priced, error)
    return priced


def _without_price(priced: Priced, error: Exception) -> Priced:
    problem = str(error) if isinstance(error, PacelineError) else in_words(error)
    print(f"warning: no prediction: {problem}", file=sys.stderr)
    return replace(priced, profile=None, problem=problem)


def _profiled(priced: Priced) -> Priced:
    """Add the job's cost. A job that can't be profiled is trained all the same."""
    from paceline.model.cost.trace import profile_job
    from paceline.planner.multi_model import priced as as_priced
    from paceline.planner.pieces import LazyPieces

    try:
        priced = replace(priced, job=as_priced(priced.job))
        profile = priced.profile or profile_job(
            priced.job, device=priced.resolved.cluster.first_here
        )
        pieces = LazyPieces(priced.job, profile)
        if priced.resolved.plan.splits_model and not pieces.count():
            raise PlanError(pieces.problem)
    except Exception as error:  # the model may do anything when it is profiled
        return _without_price(priced, error)
    return replace(priced, profile=profile, pieces=pieces)


def predict_once_started(board: HeartbeatTable, priced: Priced, run_dir: Path) -> None:
    """Predict while the ranks run, once the first one has taken a step and start-up is over.

    The prediction waits because it measures a device's rates.
    """
    is_predicted = priced.chosen is not None and priced.chosen.estimate is not None
    while not is_predicted and board.read(0).step < 2:
        if board.over:
            return
        time.sleep(0.05)
    try:
        apart_from_cuda(lambda: _predict(priced, run_dir))
    except OSError as error:  # a full disk, or a missing run folder, which ranks report
        print(
            f"warning: can't write {run_dir / folder.PREDICTED}: {error.strerror}", file=sys.stderr
        )


def _predict(priced: Priced, run_dir: Path) -> None:
    """Write the predicted figures into the run folder."""
    from paceline.base.files import write_json

    chosen = priced.chosen
    estimate = (chosen and chosen.estimate) or _estimate(priced)
    if estimate is None:
        write_json(run_dir / folder.PREDICTED, {"step_s": None, "peak_memory_bytes": None})
        return
    write_json(
        run_dir / folder.PREDICTED,
        {
            "step_s": estimate.step_s,
            "step_s_low": estimate.low_s,
            "step_s_high": estimate.high_s,
            "peak_memory_bytes": estimate.peak_memory_bytes,
            "ledger": dict(estimate.ledger),
            "breakdown": dict(estimate.breakdown),
            "ranks": [{"rank": need.name, "ledger": dict(need.ledger)} for need in estimate.needs],
            "considered": [
                {
                    "plan": str(each.plan),
                    "step_s": each.estimate.step_s,
                    "peak_memory_bytes": each.estimate.peak_memory_bytes,
                }
                for each in (chosen.considered if chosen else ())
            ],
        },
    )


def _estimate(priced: Priced) -> Estimate | None:
    from paceline.planner.rank_kinds import measured_rates

    if priced.profile is None and not priced.problem:
        priced = _profiled(priced)
    if (planning := priced.planning()) is None:
        return None
    plan, cluster = priced.resolved.plan, priced.resolved.cluster
    try:
        return planning.price(
            plan,
            with_links(cluster, measure=False),
            rates=measured_rates(cluster, waiting=plan.splits_model, oldest_s=math.inf),
            snapshot=priced.snapshot,
        )
    except Exception as error:  # as above
        _without_price(priced, error)
        return None


def sum_up(run_dir: Path, figures: dict[str, Any], priced: Priced) -> dict[str, Any]:
    """Write the summary together with the prediction; print a line if the prediction missed."""
    from paceline.base.files import write_json

    if not (run_dir / folder.PREDICTED).exists():
        apart_from_cuda(lambda: _predict(priced, run_dir))
    predicted = folder.read_document(run_dir, folder.PREDICTED)
    figures = {
        **figures,
        "predicted": {
            key: predicted.get(key)
            for key in ("step_s", "step_s_low", "step_s_high", "peak_memory_bytes")
        },
    }
    if missed := miss(figures):
        print(missed, file=sys.stderr, flush=True)
    if corrected := _look_again(figures, priced):
        print(corrected, file=sys.stderr, flush=True)
    write_json(run_dir / folder.SUMMARY, figures)
    return figures


def _look_again(figures: Mapping[str, Any], priced: Priced) -> str:
    """Measure again, or try plans again next time, if steps took far more or less than predicted.

    Returns what changed, for people; empty if nothing did.
    """
    from paceline.api.calibration import FAR_OFF
    from paceline.api.known_trials import forget_trials

    predicted_s, took_s = figures["predicted"]["step_s"], figures["step_s"]
    kind = priced.resolved.cluster.devices[-1].kind
    if predicted_s is None or not took_s or figures["steps"] <= FEW_STEPS or kind != "cpu":
        return ""
    if 1 / FAR_OFF < took_s / predicted_s < FAR_OFF:
        return ""
    if priced.chosen is not None and priced.chosen.tried_job:
        forget_trials(priced.chosen.tried_job)
        return "steps differ from those of the trials: plans are tried again next time"
    changed = refresh_device(kind)
    return f"this CPU: {changed}" if changed else ""


def miss(figures: Mapping[str, Any]) -> str:
    """Return a line about a step or a memory that was predicted wrongly; empty if there is none.

    Steps of a run of few steps are not compared, because they are mostly its start.
    """
    predicted, took_s = figures["predicted"], figures["step_s"]
    low_s, high_s = predicted["step_s_low"], predicted["step_s_high"]
    held_bytes, thought_bytes = figures["peak_memory_bytes"], predicted["peak_memory_bytes"]
    if low_s and took_s and figures["steps"] > FEW_STEPS and not low_s <= took_s <= high_s:
        what = f"step {in_ms(took_s)}, predicted {three_digits(1e3 * low_s)} to {in_ms(high_s)}"
    elif (
        held_bytes
        and thought_bytes
        and abs(thought_bytes - held_bytes) > max(MEMORY_SPREAD * held_bytes, SMALL_BYTES)
    ):
        what = f"memory {in_mib(held_bytes)} a rank, predicted {in_mib(thought_bytes)}"
    else:
        return ""
    return f"{what}; paceline report compares them part by part"


def what_would_fit(priced: Priced) -> str:
    """Return help for a run that ran out of memory: the ledger of its ranks, and the smallest
    change of plan that needs less.
    """
    return str(apart_from_cuda(lambda: _what_would_fit(priced)))


def _what_would_fit(priced: Priced) -> str:
    from paceline.planner.fit import smallest_change

    priced, resolved = _profiled(priced), priced.resolved
    if (planning := priced.planning()) is None:
        return f"no ledger: {priced.problem}"
    try:
        return smallest_change(planning, resolved.plan, resolved.cluster, snapshot=priced.snapshot)
    except Exception as error:  # as above
        return f"no ledger: {error}"
