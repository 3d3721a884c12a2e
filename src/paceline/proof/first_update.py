"""Check whether a plan's first update is one device's; a run does this before it trains.

A separate process takes the first step on one device, and separate ranks take it under the plan.
Both end before the run's ranks start, so the check leaves no trace in the run.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.base.errors import OutOfMemory, PlanRefused, in_words
from paceline.base.temporary import temporary_folder
from paceline.cluster.limits import free_memory_bytes
from paceline.job import Job
from paceline.planner.resolve import Resolved

_POLL_S = 0.005
# Files in the folder of a check: documents and tensors of one device, and a file that says that a
# plan exceeds the first limits.
_NARROW, _MEASURED, _WHOLE, _CUT, _BEYOND = "narrow.json", "measured.json", "whole", "cut", "beyond"
# file of a rank that has taken its step and waits for one device, so its core is free
_WAITS = "waits-{}"


@dataclass(frozen=True, slots=True)
class FirstUpdate:
    """The result of the check of a plan's first update."""

    # "passed", "coupled" (the plan equals one device that cuts the batch in the same way) or
    # "unchecked"
    verdict: str
    reason: str = ""  # why it is coupled or was not checked; "" if it passed
    seconds: float = 0.0  # duration of the check; 0.0 if it didn't run
    # whether one device and a rank failed with an error of the same kind, so that the run will
    # report it
    fails_alike: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "seconds": self.seconds,
            "fails_alike": self.fails_alike,
        }


def check_first_update(job: Job, resolved: Resolved, *, timeout_s: float) -> FirstUpdate:
    """Take the first step on one device and under the plan, and compare loss, gradients, weights
    and buffers.

    Most plans are within limits for which one device needs no second step. For others, the
    yardstick is measured, and the plan's ranks take their step once more beside one device that
    cuts the batch in the same way.

    Raises:
        PlanRefused: the two differ by more than rounding.
        RankFailed: a rank failed, as it would have in the run.
    """
    from paceline.launch.process.background import aside

    began_s, steps = time.monotonic(), job.total_steps
    job = replace(job.with_training_only(), steps=1, epochs=None)
    with (
        temporary_folder("check") as folder,
        aside(lambda: _write_references(job, resolved, folder, steps=steps)) as has_ended,
    ):
        reference, difference = _compared(
            job, resolved, folder / _NARROW, folder / _WHOLE, has_ended, timeout_s=timeout_s
        )
        if difference is not None:
            (folder / _BEYOND).touch()
            tensors = folder / (_CUT if _is_cut(resolved) else _WHOLE)
            reference, difference = _compared(
                job, resolved, folder / _MEASURED, tensors, has_ended, timeout_s=timeout_s
            )
    return _judged(resolved, reference, difference, time.monotonic() - began_s)


def _compared(
    job: Job,
    resolved: Resolved,
    document: Path,
    tensors: Path,
    has_ended: Callable[[], bool],
    *,
    timeout_s: float,
) -> tuple[dict[str, Any], str | None]:
    """Let the plan's ranks take the first step while one device does.

    Args:
        document: The file in which one device leaves its figures.
        tensors: The folder in which one device leaves its tensors.
        has_ended: Returns whether one device's process has ended.

    Returns:
        One device's figures or its error, and the difference in words; None if there is none.
    """
    from paceline.launch.local.ranks import run_local
    from paceline.launch.process.failure import RankFailed
    from paceline.planner.devices import devices_of
    from paceline.proof.compare import judge
    from paceline.proof.ranks import recomputed_forwards
    from paceline.training.drivers import fault_policy

    body = _watched(
        job, resolved, document, tensors, has_ended, devices_of(resolved.plan, resolved.cluster)
    )
    try:
        ranks = run_local(
            body,
            resolved.cluster.devices,
            timeout_s=timeout_s,
            fault_policy=fault_policy(resolved.plan),
        )
    except RankFailed as error:  # a server may miss a worker that has found no reference
        if error.failure.is_stop or "error" not in (
            reference := _read_reference(document, over=has_ended())
        ):
            raise
        is_memory = error.exit_code == OutOfMemory.exit_code  # the check itself takes memory
        return {
            **reference,
            "fails_alike": not is_memory and reference.get("kind") == error.failure.kind,
        }, None
    reference = _read_reference(document, over=True)
    if "error" in reference:
        return reference, None
    verdict = judge(
        reference, ranks, precision=job.precision, forwards=recomputed_forwards(resolved.plan)
    )
    return reference, verdict.difference


def _read_reference(document: Path, *, over: bool) -> dict[str, Any]:
    """Return one device's figures or its error; empty while it computes.

    Args:
        over: Whether its process has ended.
    """
    if document.exists():
        figures: dict[str, Any] = json.loads(document.read_text())
        return figures
    return {"error": "its process was ended from outside, or ended itself"} if over else {}


def _judged(
    resolved: Resolved, reference: dict[str, Any], difference: str | None, seconds: float
) -> FirstUpdate:
    if "error" in reference:
        return FirstUpdate(
            "unchecked",
            f"one device could not take the first step: {reference['error'].splitlines()[0]}",
            seconds,
            reference.get("fails_alike", False),
        )
    if reference["loss_keeps_state"] and _is_cut(resolved):
        raise PlanRefused(
            "the loss keeps a state of its own: called again with the same output and target, it gives another value. "
            f"Under '{resolved.plan}' it is called for parts of a batch, and each rank has a state of its own",
            hint="let the model keep the state in a buffer and return what the loss needs, or use a plan with one "
            "replica and one micro-batch; --check no trains all the same",
        )
    if (kept_rows := reference["kept_rows"]) is not None and _is_cut(resolved):
        raise PlanRefused(
            f"the model keeps {kept_rows} from one batch to the next, with a part for each sample. "
            f"Under '{resolved.plan}' "
            "replicas and micro-batches have other samples, and would go on with the mean of their states or with each "
            "other's",
            hint="plans that don't cut the batch (tensor=N, place=auto parts=N) run the model as it is. In a step of "
            'one\'s own a module without parameters keeps the state of all samples; see "what samples share" in '
            "docs/own-step.md. --check no trains all the same",
        )
    if difference is not None:
        raise PlanRefused(
            f"the first update under '{resolved.plan}' is not what one device computes: {difference}",
            hint="nothing was trained. 'paceline verify' says more of it and which plans are exact for this job; "
            "'single' always is, and --check no trains all the same",
        )
    if reference["coupling"] is None and reference["cause"] is None:
        return FirstUpdate("passed", seconds=seconds)
    if reference["coupling"] is None:
        return FirstUpdate(
            "coupled",
            f"the first update is one device's, and others need not be: {reference['cause']}",
            seconds,
        )
    if reference["left_on"]:
        return FirstUpdate(
            "coupled",
            "the job draws random numbers that can't be replaced by their mean for a comparison "
            f"({', '.join(reference['left_on'])}), and a batch that is cut draws others: that moves the "
            f"{reference['coupling']}. The run equals one device that cuts the batch alike",
            seconds,
        )
    if cause := reference.get("cause"):
        return FirstUpdate(
            "coupled",
            "cutting a batch changes what this job computes, on one device already: it moves "
            f"the {reference['coupling']}. {cause[:1].upper()}{cause[1:]}",
            seconds,
        )
    return FirstUpdate(
        "coupled",
        "cutting a batch changes what this job computes, on one device already: it moves the "
        f"{reference['coupling']}. Samples of a batch are coupled (a BatchNorm, a contrastive loss), or a scalar loss "
        "is not the mean over its samples; 'paceline verify' names the cause",
        seconds,
    )


def _is_cut(resolved: Resolved) -> bool:
    return resolved.plan.replicas > 1 or resolved.plan.num_microbatches > 1


def _watched(
    job: Job,
    resolved: Resolved,
    document: Path,
    tensors: Path,
    has_ended: Callable[[], bool],
    devices: Any,
) -> Callable[[Any], dict[str, Any]]:
    """Return the function that each rank runs.

    It takes the first step, while one device does the same, with a recorder that waits for one
    device's figures.
    """

    def body(context: Any) -> dict[str, Any]:
        from paceline.base.logs import without_notes
        from paceline.model.randomness import WithoutRandomness
        from paceline.proof.compare import DifferenceRecorder
        from paceline.proof.ranks import in_precision
        from paceline.training.drivers import train_rank
        from paceline.training.settings import Settings

        def wait() -> None:
            document.with_name(_WAITS.format(context.rank)).touch()
            while not document.exists():
                if has_ended() and not document.exists():
                    raise _NoReferenceError
                context.beat("backward")
                time.sleep(_POLL_S)
            if "error" in json.loads(document.read_text()):
                raise _NoReferenceError

        with without_notes(), WithoutRandomness() as random:
            recorder = DifferenceRecorder(tensors, random, ready=wait)
            with suppress(_NoReferenceError):
                train_rank(
                    context,
                    in_precision(job, job.precision, random),
                    resolved.plan,
                    Settings(
                        None, resolved.shares, is_trial=True, observer=recorder, devices=devices
                    ),
                )
        return recorder.to_dict()

    return body


class _NoReferenceError(Exception):
    """One device could not take the first step."""


def _write_references(job: Job, resolved: Resolved, folder: Path, *, steps: int | None) -> None:
    """Write one device's first step with the whole batch, and measured limits if the plan exceeds
    the first ones.

    The measured reference also cuts the batch as the plan does. This runs in a separate process,
    which is ended when no more is needed.

    Args:
        steps: Of the whole job; None if the end of its data decides.
    """
    from paceline.launch.process.background import take_cores
    from paceline.model.randomness import WithoutRandomness
    from paceline.proof.first_step import FirstStep
    from paceline.proof.ranks import in_precision

    # models in memory at once: each replica has its own
    models = 1 + resolved.plan.num_copies
    most_bytes = free_memory_bytes() // models
    with suppress(
        ValueError, OSError
    ):  # not every system has this limit; a model that is too large is an error here
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    random = WithoutRandomness()

    first_steps: list[FirstStep] = []
    waits = [folder / _WAITS.format(rank) for rank in range(resolved.plan.world_size)]

    def take_free_cores() -> bool:
        if not all(path.exists() for path in waits):
            return False
        take_cores()
        return True

    def narrow() -> dict[str, Any]:
        exact = in_precision(job, job.precision, random)
        first_steps.append(FirstStep(exact, folder / _WHOLE, random, take_cores=take_free_cores))
        if _is_cut(resolved):
            first_steps[0].look_further(steps=steps)
        return first_steps[0].narrow()

    _tell(folder / _NARROW, narrow)
    while not (folder / _BEYOND).exists():
        time.sleep(_POLL_S)
    _tell(
        folder / _MEASURED,
        lambda: first_steps[0].measured(
            shares=resolved.shares,
            microbatches=resolved.plan.num_microbatches,
            cut_folder=folder / _CUT,
        ),
    )


def _tell(document: Path, compute: Callable[[], dict[str, Any]]) -> None:
    """Write the result of `compute`, or its error, in one move."""
    try:
        figures = compute()
    except Exception as error:
        figures = {"error": in_words(error), "kind": type(error).__name__}
    part = document.with_suffix(".part")
    part.write_text(json.dumps(figures))
    part.replace(document)
