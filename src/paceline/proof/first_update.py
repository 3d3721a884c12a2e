"""Whether a plan's first update is one device's: what a run asks before it trains.

A process of its own takes the first step on one device, as the plan cuts the batch; ranks of their own take it under
the plan. Both end before the run's ranks start, so the run is as if nothing had happened.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from paceline.errors import PlanRefused
from paceline.job import Job
from paceline.planner.resolve import Resolved

_POLL_S = 0.005
_REFERENCE = "reference.json"
_SHARE_OF_MEMORY = 0.5  # of what is free, that one device may take: the plan's ranks take theirs at the same time


@dataclass(frozen=True, slots=True)
class FirstUpdate:
    """What is known of a plan before the first step of a run.

    verdict: "passed", "coupled" (it equals one device that cuts the batch alike) or "unchecked".
    reason: why it is coupled or was not checked; "" if it passed.
    seconds: that the check took; 0.0 if it didn't run.
    """

    verdict: str
    reason: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "reason": self.reason, "seconds": self.seconds}


def check_first_update(job: Job, asked: Resolved, *, timeout_s: float) -> FirstUpdate:
    """Take the first step on one device and under the plan, and compare loss, gradients, weights and buffers.

    Raises:
        PlanRefused: they differ by more than rounding.
        RankFailed: a rank failed, as it would have in the run.
    """
    from paceline.launch.aside import aside
    from paceline.launch.local import run_local
    from paceline.planner.estimate import devices_of
    from paceline.runtime.drivers import crew

    began_s = time.monotonic()
    job = replace(job, steps=1, epochs=None, validation=None, metrics={})
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as name:
        folder = Path(name)
        body = _watched(job, asked, folder, devices_of(asked.plan, asked.cluster))
        with aside(lambda: _write_reference(job, asked, folder)):
            ranks = run_local(body, asked.cluster.devices, timeout_s=timeout_s, crew=crew(asked.plan))
        reference = json.loads((folder / _REFERENCE).read_text())
    seconds = time.monotonic() - began_s
    if "error" in reference:
        return FirstUpdate("unchecked", "one device could not take the first step: "
                           f"{reference['error'].splitlines()[0]}", seconds)
    return _judged(job, asked, reference, ranks, seconds)


def _judged(job: Job, asked: Resolved, reference: dict[str, Any], ranks: list[dict[str, Any]],
            seconds: float) -> FirstUpdate:
    from paceline.proof.compare import judge
    from paceline.proof.ranks import recomputed_forwards

    verdict = judge(reference, ranks, precision=job.precision, forwards=recomputed_forwards(asked.plan))
    if verdict.difference is not None:
        raise PlanRefused(
            f"the first update under '{asked.plan}' is not what one device computes: {verdict.difference}",
            hint="nothing was trained. 'paceline verify' says more of it and which plans are exact for this job; "
                 "'single' always is, and --check no trains all the same")
    if reference["coupling"] is None:
        return FirstUpdate("passed", seconds=seconds)
    return FirstUpdate(
        "coupled", "cutting a batch changes what this job computes, on one device already: it moves the "
        f"{reference['coupling']}. Samples of a batch are coupled (a BatchNorm, a contrastive loss), or a scalar loss "
        "is not the mean over its samples; 'paceline verify' names the cause", seconds)


def _watched(job: Job, asked: Resolved, folder: Path, devices: Any) -> Callable[[Any], dict[str, Any]]:
    """What each rank does: the first step, with a recorder that waits for the reference before it compares."""
    def body(context: Any) -> dict[str, Any]:
        from paceline.capture.randomness import WithoutRandomness
        from paceline.proof.compare import Recorder
        from paceline.proof.ranks import in_precision
        from paceline.runtime.drivers import train_rank
        from paceline.runtime.loop import Settings

        def wait() -> None:
            while not (folder / _REFERENCE).exists():
                context.beat("reduce")
                time.sleep(_POLL_S)
            if "error" in json.loads((folder / _REFERENCE).read_text()):
                raise _NoReferenceError

        with WithoutRandomness() as random:
            recorder = Recorder(folder / "tensors", random, ready=wait)
            with suppress(_NoReferenceError):
                train_rank(context, in_precision(job, job.precision, random), asked.plan,
                           Settings(None, asked.shares, observer=recorder, devices=devices))
        return recorder.to_dict()

    return body


class _NoReferenceError(Exception):
    """One device could not take the first step."""


def _write_reference(job: Job, asked: Resolved, folder: Path) -> None:
    """One device's first step: whole, its rounding, and as the plan cuts the batch. Runs in a process of its own."""
    from paceline.capture.randomness import WithoutRandomness
    from paceline.proof.ranks import in_precision
    from paceline.proof.reference import Variation, write_cut, write_reference
    from paceline.runtime.checkpoint.write import write_json

    tensors, whole = folder / "tensors", folder / "whole"
    try:
        most_bytes = int(psutil.virtual_memory().available * _SHARE_OF_MEMORY)
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))  # a model that is too large is an error here
        random = WithoutRandomness()
        exact = in_precision(job, job.precision, random)
        cuts = asked.plan.replicas > 1 or asked.plan.num_microbatches > 1
        found = write_reference(exact, whole if cuts else tensors, steps=1, random=random, judges_power=False,
                                variations=(Variation(shake=1.0), Variation(nudge=1.0)))
        found["coupling"] = None
        if cuts:
            with random if random.is_needed else nullcontext():
                found = write_cut(exact, tensors, found, beside=whole, shares=asked.shares,
                                  microbatches=asked.plan.num_microbatches)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    write_json(folder / _REFERENCE, found)
