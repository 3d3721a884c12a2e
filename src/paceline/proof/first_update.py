"""Check whether a plan's first update is one device's; a run does this before it trains.

A separate process takes the first step on one device. After it has ended, ranks take the step under
the plan. All of them end before the run's ranks start, so the check leaves no trace in the run, and
no device holds two models at once.
"""

from __future__ import annotations

import resource
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.errors import OutOfMemory, PlanRefused
from paceline.base.fork import in_a_fork
from paceline.base.logs import redirect, without_notes
from paceline.base.temporary import temporary_folder
from paceline.cluster.limits import free_memory_bytes
from paceline.job import Job
from paceline.launch.process.failure import RankFailed
from paceline.model.cost.trace import fake_model, state_factor
from paceline.model.randomness import WithoutRandomness
from paceline.planner.resolve import Resolved
from paceline.proof.compare import judge
from paceline.proof.kept_rows import kept_rows
from paceline.proof.order import whole_batches
from paceline.proof.problems import computation_keeps_state, later_problem, loss_problem
from paceline.proof.processes import (
    Proof,
    alone,
    in_precision,
    recomputed_forwards,
    watched,
)
from paceline.proof.reference import write_cut, write_first_step
from paceline.proof.reference_loop import BatchCut, Variation
from paceline.training.products import float32_products

# These measure the yardstick for a plan that exceeds the first limits.
_VARIATIONS = (Variation(nudge=1.0),)


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
        return asdict(self)


def check_first_update(job: Job, resolved: Resolved, *, timeout_s: float) -> FirstUpdate:
    """Take the first step on one device and under the plan, and compare loss, gradients, weights
    and buffers.

    Most plans are within limits for which one device needs no second step. For others, one device
    measures the yardstick and cuts the batch as the plan does, and the plan's ranks take their step
    once more.

    Raises:
        PlanRefused: the two differ by more than rounding.
        RankFailed: a rank failed, as it would have in the run.
    """
    began_s = time.monotonic()
    with temporary_folder("check") as folder:
        check = _Check(job, resolved, folder, timeout_s)
        try:
            update = check.judged()
        except _OneDeviceFailedError as error:
            update = check.without_one_device(error.cause)
    return replace(update, seconds=time.monotonic() - began_s)


class _OneDeviceFailedError(Exception):
    """One device could not take the first step."""

    def __init__(self, cause: RankFailed) -> None:
        super().__init__()
        self.cause = cause


class _Check:
    """The check of one plan's first update.

    Args:
        folder: For the tensors of one device.
    """

    def __init__(self, job: Job, resolved: Resolved, folder: Path, timeout_s: float) -> None:
        self.resolved, self.timeout_s, self.num_steps = resolved, timeout_s, job.total_steps
        self.job = replace(job.with_training_only(), steps=1, epochs=None)
        self.folder, self.cut = folder / self.job.precision, BatchCut.of(resolved)
        devices = resolved.cluster.devices
        self.device = next((device for device in devices if device.kind != "cpu"), devices[0])

    def judged(self) -> FirstUpdate:
        """Take the step on one device and under the plan, and compare.

        Raises:
            _OneDeviceFailedError: one device could not take it.
        """
        if not self._has_room():
            return FirstUpdate(
                "unchecked",
                f"{self.device} has no room for the whole model, its gradients and the optimizer's state",
            )
        reference = self._one_device(self._first)
        if not self.cut.is_whole:
            self._refuse_states(reference)
        difference = self._difference(reference)
        if difference is not None:
            reference |= self._one_device(self._measured)
            difference = self._difference(reference)
        if difference is not None:
            raise PlanRefused(
                f"the first update under '{self.resolved.plan}' is not what one device computes: {difference}",
                hint="nothing was trained. 'paceline verify' says more of it and which plans are exact for this job; "
                "'single' always is, and --check no trains all the same",
            )
        reason = _coupling(reference)
        return FirstUpdate("coupled" if reason else "passed", reason)

    def without_one_device(self, error: RankFailed) -> FirstUpdate:
        """Return that nothing was compared, and whether the plan's ranks fail in the same way."""
        fails_alike = False
        if error.exit_code != OutOfMemory.exit_code:
            try:  # ranks that come as far as a comparison fail there
                self._watched({"folder": str(self.folder), "is_random": True, "evaluation": {}})
            except RankFailed as failed:
                if failed.failure.is_stop:
                    raise
                fails_alike = failed.failure.kind == error.failure.kind
        reason = error.failure.message.partition("\n")[0]
        return FirstUpdate(
            "unchecked",
            f"one device could not take the first step: {reason}",
            fails_alike=fails_alike,
        )

    def _has_room(self) -> bool:
        """Whether a GPU may have room for a step: at least for weights, gradients and the
        optimizer's state.

        A model that no GPU has room for would take long to build on the host.
        """
        if self.device.kind == "cpu":  # see `_one_device`
            return True
        try:
            num_bytes: float = in_a_fork(partial(_state_bytes, self.job), timeout_s=self.timeout_s)
        except Exception:  # not every model can be built without memory
            return True
        return num_bytes <= self.device.memory_bytes

    def _one_device(self, step: Any) -> dict[str, Any]:
        """Return the figures that one device finds in its step, in a separate process.

        Raises:
            _OneDeviceFailedError: it could not take the step.
        """

        def work(context: Any) -> dict[str, Any]:
            if context.device.type == "cpu":
                most_bytes = free_memory_bytes()
                with suppress(ValueError, OSError):  # not every system has this limit
                    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
            random = WithoutRandomness()
            job = in_precision(self.job, self.job.precision, random)
            with without_notes(), float32_products(job, context):
                found: dict[str, Any] = step(job, random)
            return found

        try:
            return alone(work, self.device, timeout_s=self.timeout_s)
        except RankFailed as error:
            if error.failure.is_stop:
                raise
            raise _OneDeviceFailedError(error) from error

    def _first(self, job: Job, random: WithoutRandomness) -> dict[str, Any]:
        """Take the step with the whole batch, and look for problems that it does not show."""
        figures, run = write_first_step(job, self.folder, random=random)
        rows = cause = None
        with random if random.is_needed else nullcontext():
            keeps_state = run.loss_keeps_state()
            with suppress(Exception):  # the model may refuse half a batch
                rows = kept_rows(run, next(whole_batches(job, 1)))
            if not (self.cut.is_whole or random.left_on):
                with suppress(Exception):  # the run will report it
                    problem = later_problem(job, run.model, steps=self.num_steps)
                    cause = problem and str(problem)
        return {
            **figures,
            "is_random": random.is_needed,
            "left_on": sorted(random.left_on),
            "loss_keeps_state": keeps_state or computation_keeps_state(job, run.model),
            "kept_rows": rows,
            "coupling": None,
            "cause": cause,
        }

    def _measured(self, job: Job, random: WithoutRandomness) -> dict[str, Any]:
        """Take the step again with measured limits, and cut the batch as the plan does."""
        figures, _ = write_first_step(job, self.folder, random=random, variations=_VARIATIONS)
        with random if random.is_needed else nullcontext():
            if not self.cut.is_whole:
                figures = write_cut(job, figures, cut=self.cut, variations=_VARIATIONS)
            if figures.get("coupling") is not None:
                with suppress(Exception):  # the cause is only additional information
                    if problem := loss_problem(job, whole_batches(job, 1)):
                        figures["cause"] = str(problem)
        return figures

    def _refuse_states(self, reference: dict[str, Any]) -> None:
        """Refuse a plan that cuts the batch if the job keeps a state that can't be cut."""
        if reference["loss_keeps_state"]:
            raise PlanRefused(
                "the loss keeps a state of its own: called again with the same output and target, it gives another "
                f"value. Under '{self.resolved.plan}' it is called for parts of a batch, and each rank has a state of "
                "its own",
                hint="let the model keep the state in a buffer and return what the loss needs, or use a plan with one "
                "replica and one micro-batch; --check no trains all the same",
            )
        if (rows := reference["kept_rows"]) is not None:
            raise PlanRefused(
                f"the model keeps {rows} from one batch to the next, with a part for each sample. "
                f"Under '{self.resolved.plan}' replicas and micro-batches have other samples, and would go on with "
                "the mean of their states or with each other's",
                hint="plans that don't cut the batch (tensor=N, place=N) run the model as it is. In a step "
                "of one's own a module without parameters keeps the state of all samples; see "
                '"what samples share" of `paceline docs own-step`. --check no trains all the same',
            )

    def _watched(self, reference: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what each rank records of the plan's step, with differences from one device."""
        precision = self.job.precision
        proof = Proof(self.job, self.folder, 0, {precision: reference}, self.timeout_s)
        return [rank[precision] for rank in watched(proof, self.resolved, proof.figures)]

    def _difference(self, reference: dict[str, Any]) -> str | None:
        """Return the difference of the plan's step from one device's, in words; None if there is
        none.
        """
        forwards = recomputed_forwards(self.resolved.plan)
        ranks = self._watched(reference)
        return judge(reference, ranks, precision=self.job.precision, forwards=forwards).difference


def _state_bytes(job: Job) -> float:
    """Return the bytes of weights, gradients and the optimizer's state."""
    redirect(None)  # hide what the job's own code prints; it prints all of it again in the run
    model = fake_model(job).model
    copies = 2.0 + state_factor(job, model)  # of each trained weight
    return sum(
        p.numel() * p.itemsize * (copies if p.requires_grad else 1.0) for p in model.parameters()
    )


def _coupling(reference: dict[str, Any]) -> str:
    """Return why later updates need not be one device's; "" if nothing was found."""
    coupling, cause = reference["coupling"], reference["cause"]
    if coupling is None:
        return f"the first update is one device's, and others need not be: {cause}" if cause else ""
    if reference["left_on"]:
        return (
            "the job draws random numbers that can't be replaced by their mean for a comparison "
            f"({', '.join(reference['left_on'])}), and a batch that is cut draws others: that moves the "
            f"{coupling}. The run equals one device that cuts the batch alike"
        )
    moved = (
        "cutting a batch changes what this job computes, on one device already: it moves the "
        f"{coupling}. "
    )
    return moved + (
        f"{cause[:1].upper()}{cause[1:]}"
        if cause
        else "Samples of a batch are coupled (a BatchNorm, a contrastive loss), or a scalar loss "
        "is not the mean over its samples; 'paceline verify' names the cause"
    )
