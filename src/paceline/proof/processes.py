"""The processes of a proof: one that computes the reference on one device, and the observed ranks
of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.base.errors import CheckpointError, NotDeterministic
from paceline.base.logs import without_notes
from paceline.checkpoint.read import open_checkpoint
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.job import Job, Precision, named_fields
from paceline.launch.local.ranks import run_local
from paceline.model.randomness import WithoutRandomness
from paceline.planner.resolve import Resolved
from paceline.proof.compare import DifferenceRecorder, file_difference
from paceline.proof.device import computing_on
from paceline.proof.order import order_difference
from paceline.proof.problems import job_problem
from paceline.proof.reference import evaluation_data, write_cut, write_reference
from paceline.proof.reference_loop import BatchCut
from paceline.proof.subject import subject
from paceline.strategies.active_plan import ActivePlan
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.training.determinism import deterministic_algorithms
from paceline.training.drivers import fault_policy, train_rank
from paceline.training.products import float32_products
from paceline.training.settings import Settings
from paceline.training.stepper import Stepper

RUNS = "runs"  # below the folder of a proof: run folders with checkpoints, one for each plan


@dataclass(frozen=True)
class Proof:
    """The reference with which all plans of a proof are compared."""

    job: Job  # as it is trained for the proof
    folder: Path  # of the reference, with a folder for each precision
    saved_step: int  # the step after which runs save; 0 if they don't
    # documents of one device, by precision; the last one is the finest
    figures: Mapping[Precision, dict[str, Any]]
    timeout_s: float
    # The devices that one device and the ranks use; None for as many CPU devices as a plan has
    # ranks.
    devices: tuple[str, ...] | None = None

    @property
    def finest(self) -> Precision:
        return list(self.figures)[-1]


def names_of(devices: Sequence[str] | None, count: int) -> str:
    """Return the names of the first `count` given devices.

    >>> names_of(("cuda:1", "cuda:2"), 1), names_of(None, 2)
    ('cuda:1', 'cpu:0-1')
    """
    return f"cpu:0-{count - 1}" if devices is None else ",".join(devices[:count])


def first_device(devices: Sequence[str] | None) -> Device:
    """Return the device of the reference."""
    return Cluster.local(names_of(devices, 1)).devices[0]


def num_devices(plan: Plan, devices: Sequence[str] | None) -> int:
    """Return how many of the given devices a plan takes; if these are GPUs, servers compute on the
    CPU.
    """
    has_gpus = devices is not None and not devices[0].startswith("cpu")
    return plan.world_size - (plan.num_cpu_ranks if has_gpus else 0)


def alone(
    work: Callable[[Any], dict[str, Any]], device: Device, *, timeout_s: float
) -> dict[str, Any]:
    """Return `work(context)` from a separate process, whose plain loop computes on the device.

    Because of the separate process, this one can still fork. A GPU uses deterministic algorithms.
    If an operator has none, everything is done again without, and `nondeterministic` of the result
    names such operators.
    """

    def body(context: Any) -> dict[str, Any]:
        with computing_on(context.device):
            if context.device.type == "cpu":
                return {**work(context), "nondeterministic": []}
            with suppress(NotDeterministic), deterministic_algorithms():
                return {**work(context), "nondeterministic": []}
            with deterministic_algorithms(strict=False) as missing:
                return {**work(context), "nondeterministic": sorted(missing)}

    result: dict[str, Any] = run_local(body, [device], timeout_s=timeout_s)[0]
    return result


def in_precision(job: Job, precision: Precision, random: Any) -> Job:
    """Return the job as it is compared: in a precision, and with random layers off except for the
    initial weights.
    """
    return replace(job, precision=precision, **named_fields.with_builders(job, random.building))


def reference_of(
    job: Job,
    folder: Path,
    *,
    saved_step: int,
    timeout_s: float,
    devices: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Compute one device's figures by precision, in a separate process on the first of the devices.

    A checkpoint of one device after `saved_step` steps is left in `folder`/runs/single.

    Returns:
        figures: for each precision that the job runs in.
        problem: of the job itself, as a document; None if there is none.
        note: what the proof does not cover.
        subject: what was compared.

    Raises:
        PacelineError: the job fails on one device.
    """
    steps = job.total_steps
    assert steps is not None

    def run(precision: Precision) -> dict[str, Any]:
        random = WithoutRandomness()
        exact = in_precision(job, precision, random)
        figures = write_reference(
            exact, folder / precision, steps=steps, evaluation=evaluation_data(job), random=random
        )
        with random if random.is_needed else nullcontext():
            problem = job_problem(exact, steps=steps)
        return {
            **figures,
            "problem": None if problem is None else problem.to_dict(),
            "left": sorted(random.left_on),
            "is_random": random.is_needed,
        }

    def work(context: Any) -> dict[str, Any]:
        # This refuses, with a readable message, a job that can't be trained.
        Stepper(job, Plan(), Mesh.of(Plan(), 0), context.device)
        with float32_products(job, context):
            figures, note = {job.precision: run(job.precision)}, None
        if job.precision != "float64":
            try:
                figures["float64"] = run("float64")
            except Exception as error:
                note = (
                    f"not judged in float64, where the job fails: {type(error).__name__}: {error}"
                )
        finest = list(figures)[-1]
        if note is None and figures[finest]["left"]:
            note = f"the job draws random numbers that can't be switched off ({', '.join(figures[finest]['left'])})"
        if note is None and figures[finest]["not_evaluated"]:
            note = f"evaluations are not compared: {figures[finest]['not_evaluated']}"
        if saved_step:
            _save_single(context, job, finest, folder, saved_step)
        return {
            "figures": figures,
            "problem": figures[finest]["problem"],
            "note": note,
            "subject": subject(job),
        }

    reference = alone(work, first_device(devices), timeout_s=timeout_s)
    if reference["nondeterministic"]:
        repeats = (
            "one device repeats its figures up to rounding alone: operators without a deterministic form are "
            f"used ({', '.join(reference['nondeterministic'])})"
        )
        reference["note"] = f"{reference['note']}; {repeats}" if reference["note"] else repeats
    reference["order"] = order_difference(job, steps=steps)
    return reference


def _save_single(
    context: Any, job: Job, precision: Precision, folder: Path, saved_step: int
) -> None:
    """Save a checkpoint under a plan without ranks, for other plans to go on from."""
    run_dir = folder / RUNS / "single"
    run_dir.mkdir(parents=True, exist_ok=True)
    with without_notes(), WithoutRandomness() as random:
        exact = replace(in_precision(job, precision, random).with_training_only(), steps=saved_step)
        train_rank(
            context, exact, Plan(), Settings(run_dir, (1,), save_every=saved_step, is_trial=True)
        )


def cut_reference(proof: Proof, cut: BatchCut) -> dict[Precision, dict[str, Any]]:
    """Compute the figures of one device that cuts every batch as a plan does; see `write_cut`."""

    def work(context: Any) -> dict[str, Any]:
        references: dict[str, Any] = {}
        for precision, whole in proof.figures.items():
            random = WithoutRandomness()
            with without_notes(), random if whole["is_random"] else nullcontext():
                job = in_precision(proof.job, precision, random)
                references[precision] = write_cut(job, whole, cut=cut)
        return references

    references = alone(work, first_device(proof.devices), timeout_s=proof.timeout_s)
    return {precision: references[precision] for precision in proof.figures}


def recomputed_forwards(plan: Plan) -> int | None:
    """Return the forwards of the whole model on a rank in a step, if the plan recomputes some; None
    if not, or not known.
    """
    return plan.num_microbatches if ActivePlan(plan).runs_again else None


def watched(
    proof: Proof,
    resolved: Resolved,
    references: Mapping[Precision, dict[str, Any]],
    *,
    number: int = 0,
    resumed_from: Path | None = None,
) -> list[dict[str, Any]]:
    """Train the job under a plan, and return every rank's record by precision.

    If `resumed_from` is given, `resumed` of a record is that of a resumed run.

    Args:
        references: One device's figures, with which the ranks are compared.
        number: Of the plan in the proof; its run folder is named by it.
        resumed_from: A run folder of another plan, from which a separate run goes on.

    Raises:
        RankFailed: a rank failed.
    """
    finest = references[proof.finest]
    run_dir: Path | None = None
    if proof.saved_step or finest["evaluation"]:
        run_dir = proof.folder / RUNS / str(number)
        run_dir.mkdir(parents=True, exist_ok=True)
    if resumed_from is not None:
        onward = proof.folder / RUNS / f"{number}-resumed"
        step = Path("checkpoints") / f"step-{proof.saved_step}"
        (onward / step.parent).mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (onward / step).symlink_to(resumed_from / step)

    def body(context: Any) -> dict[str, Any]:
        records: dict[str, Any] = {}
        for precision in proof.figures:
            watch = partial(_watch, context, proof, resolved, references[precision], precision)
            is_finest = precision == proof.finest
            records[precision] = watch(run_dir if is_finest else None)
            if is_finest and resumed_from is not None:
                records["resumed"] = watch(onward, resume=True)
        if context.rank == 0 and proof.saved_step and run_dir is not None:
            records["file"] = _file_difference(proof, run_dir, Path(finest["folder"]))
        return records

    return run_local(
        body,
        resolved.cluster.devices,
        timeout_s=proof.timeout_s,
        fault_policy=fault_policy(resolved.plan),
    )


def _watch(
    context: Any,
    proof: Proof,
    resolved: Resolved,
    reference: dict[str, Any],
    precision: Precision,
    run_dir: Path | None,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Train the job in one precision, and return the rank's record.

    With a run folder, the rank also evaluates, and saves on its way or resumes from there.
    """
    random = WithoutRandomness()
    with without_notes(), random if proof.figures[precision]["is_random"] else nullcontext():
        first_step = proof.saved_step if resume else 0
        recorder = DifferenceRecorder(Path(reference["folder"]), random, first_step=first_step)
        job = in_precision(proof.job, precision, random)
        evaluates = run_dir is not None and not resume and proof.figures[precision]["evaluation"]
        data = evaluation_data(job) if evaluates else None
        job = (
            job.with_training_only()
            if data is None
            else replace(job, validation=data, callbacks=())
        )
        train_rank(
            context,
            job,
            resolved.plan,
            Settings(
                run_dir,
                resolved.shares,
                is_trial=True,
                devices=resolved.rank_devices,
                observer=recorder,
                resume=resume,
                keep=lambda: False,
                save_every=proof.saved_step
                if run_dir is not None and not resume and proof.saved_step
                else None,
                on_evaluation=recorder.evaluation,
            ),
        )
    return recorder.to_dict()


def _file_difference(proof: Proof, run_dir: Path, folder: Path) -> str | None:
    path = run_dir / "checkpoints" / f"step-{proof.saved_step}"
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        return f"the checkpoint after step {proof.saved_step} can't be read: {error}"
    return file_difference(checkpoint, folder, proof.figures[proof.finest], step=proof.saved_step)
