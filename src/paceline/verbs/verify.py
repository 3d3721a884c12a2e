"""The verb verify: does a plan compute what one device computes, on the user's own job?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import PlanError, UsageError
from paceline.job import Job, Precision
from paceline.jobfile import JobFile
from paceline.plans import Plan
from paceline.proof import certificate
from paceline.proof.compare import Furthest, Recorder, Verdict, judge
from paceline.runtime.folder import writable

# What is tried when no plan is named: every axis, its stages, their products, uneven numbers, accumulation.
EXACT_PLANS = (
    "single accumulate=4", "data=2", "data=3", "data=2 shares=3:1", "shard=2 zero=1", "shard=2 zero=2", "shard=2",
    "data=2 shard=2", "data=2 accumulate=2 recompute=full", "pipeline=2", "pipeline=2 schedule=gpipe",
    "pipeline=2 schedule=interleaved", "pipeline=2 schedule=zero-bubble", "tensor=2", "place=auto parts=2",
    "pipeline=2 data=2", "pipeline=2 shard=2", "data=2 tensor=2", "pipeline=2 data=2 tensor=2")
_REFUSALS = (PlanError.__name__, "CaptureFailed")


@dataclass(frozen=True, slots=True)
class Certificate:
    """The verdict on one plan: in the job's own precision, and in float64, which tells a bug from rounding.

    problem: what keeps the plan from being judged or the job from being exact under any plan; None if nothing.
    note: what the verdict does not cover; None if nothing.
    refused: why the plan is none for this model, where it was not asked for; it neither passes nor fails.
    """

    plan: str
    verdicts: tuple[Verdict, ...]
    problem: str | None = None
    note: str | None = None
    refused: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None and bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """The contract's fields, of the job's precision; `precisions` holds them for each.

        `worst` is what used up most of what it may differ by, of the losses, the gradients and the weights.
        """
        shown = [{"precision": v.precision, "passed": v.passed, "max_loss_diff": v.max_loss_diff,
                  "max_gradient_diff": v.max_gradient_diff, "max_param_diff": v.max_param_diff,
                  "worst_param": v.worst_param, "steps": v.steps, "tolerance": v.tolerance, "difference": v.difference,
                  "worst": {"loss": _where(v.loss), "gradient": _where(v.gradient), "weight": _where(v.weight)}}
                 for v in self.verdicts]
        empty = {"max_loss_diff": None, "max_param_diff": None, "worst_param": None, "steps": 0, "tolerance": None}
        main = {key: shown[0][key] for key in empty} if shown else empty
        return {"plan": self.plan, "passed": self.passed, **main, "reason": self.reason, "note": self.note,
                "refused": self.refused, "precisions": shown}

    @property
    def reason(self) -> str | None:
        """Why the plan failed; None if it passed."""
        return self.problem or next((f"{v.precision}: {v.difference}" for v in self.verdicts if v.difference), None)

    def describe(self) -> str:
        """A line for the verdict, and lines for what differs."""
        if self.refused is not None:
            return f"no plan {self.plan:<36} {self.refused.splitlines()[0]}"
        mark = "passed" if self.passed else "FAILED"
        figures = "; ".join(f"{v.precision}: loss {v.max_loss_diff:.1e}, weights {v.max_param_diff:.1e}"
                            for v in self.verdicts)
        lines = [f"{mark}  {self.plan:<36} {figures}".rstrip()]
        for remark in (self.reason, self.note):
            lines += [f"        {line}".rstrip() for line in (remark or "").splitlines()]
        return "\n".join(lines)


def _where(furthest: Furthest) -> dict[str, Any]:
    return {"name": furthest.name or None, "step": furthest.step + 1, "diff": furthest.off,
            "tolerance": furthest.allowed}


def verify(job: Job | JobFile, plans: Sequence[str | Plan] = (), *, steps: int = 4, run: str | Path | None = None,
           timeout_s: float = 120.0) -> list[Certificate]:
    """Run the job for some steps on one device and under each plan, and compare losses, gradients and weights.

    Both start from the same initial weights and use the same global batches. Random layers are switched off. A
    difference may be ten times as large as what rounding does on one device; docs/verify.md says how it is measured.

    Args:
        plans: Plans or their texts; by default those of `EXACT_PLANS` that the job has samples for.
        run: A folder, made if need be, for `certificate.json` and `certificate.txt`; without it none is written.

    Raises:
        UsageError: a plan that can't be read or doesn't suit the job, or a folder that can't be written.
        PacelineError: the job fails on one device.
    """
    from paceline.strategies.compose import load

    source = job.to_dict() if run is not None and isinstance(job, JobFile) else None
    loaded = job.load() if isinstance(job, JobFile) else job
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}")
    if loaded.total_steps is not None:
        steps = min(steps, loaded.total_steps)
    loaded = replace(loaded, steps=steps, epochs=None, validation=None, metrics={})
    chosen = [Plan.read(plan) for plan in plans] or _plans_that_fit(loaded)
    for plan in chosen:
        load(plan)
    written = writable(Path(run)) if run is not None else None
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        reference = _reference(loaded, Path(folder), timeout_s=timeout_s)
        found = [_certify(loaded, plan, reference, Path(folder), timeout_s=timeout_s, asked_for=bool(plans))
                 for plan in chosen]
    if written is not None:
        certificate.write(written, _document(loaded, source, reference, found, steps))
    return found


def _document(job: Job, source: dict[str, Any] | None, reference: dict[str, Any], found: Sequence[Certificate],
              steps: int) -> dict[str, Any]:
    """All that the certificates stand on, for a file."""
    problem = reference["problem"]
    subject = dict(reference["subject"])
    return certificate.document(
        subject, [each.to_dict() for each in found], job=source,
        run={"steps": steps, "batch": job.batch, "seed": job.seed, "precision": job.precision, "clip": job.clip,
             "optimizer": subject.pop("optimizer"), "samples": job.num_samples},
        yardstick={precision: figures["yardstick"] for precision, figures in reference["figures"].items()},
        coupling=None if problem is None else problem.to_dict(), note=reference["note"])


def _plans_that_fit(job: Job) -> list[Plan]:
    most = min(job.batch, job.num_samples or job.batch)
    return [plan for plan in map(Plan.parse, EXACT_PLANS) if plan.replicas <= most]


def _in_precision(job: Job, precision: Precision, random: Any) -> Job:
    """The job as it is compared: in a precision, its random layers off but for the initial weights."""
    from paceline.capture.randomness import WithoutRandomness

    assert isinstance(random, WithoutRandomness)
    return replace(job, precision=precision, model=random.building(job.model))


def _reference(job: Job, folder: Path, *, timeout_s: float) -> dict[str, Any]:
    """One device's figures by precision, computed in a process of its own so that this one stays free to fork.

    Returns:
        figures: of each precision that the job runs in. problem: of the job itself. note: why float64 is missing.
        subject: what was compared.
    """
    from paceline.capture.randomness import WithoutRandomness
    from paceline.cluster import Cluster
    from paceline.launch.local import run_local
    from paceline.proof.problems import Problem, job_problem
    from paceline.proof.reference import sample_marks, whole_batches, write_reference
    from paceline.proof.subject import subject
    from paceline.runtime.stepper import Stepper
    from paceline.strategies.mesh import Mesh

    steps = job.total_steps
    assert steps is not None

    def run(precision: Precision) -> dict[str, Any]:
        (folder / precision).mkdir()
        with WithoutRandomness() as random:
            exact = _in_precision(job, precision, random)
            figures = write_reference(exact, folder / precision, steps=steps)
            problem = job_problem(exact, steps=steps)
            figures["problem"] = None if problem is None else problem.to_dict()
            figures["marks"] = [sample_marks(batch).tolist() for batch in whole_batches(exact, steps)]
        return {**figures, "left": sorted(random.left)}

    def body(context: Any) -> dict[str, Any]:
        Stepper(job, Plan(), Mesh(Plan().axes.sizes(), 0), context.device)  # refuses in words what can't be trained
        figures, note = {job.precision: run(job.precision)}, None
        if job.precision != "float64":
            try:
                figures["float64"] = run("float64")
            except Exception as error:
                note = f"not judged in float64, where the job fails: {type(error).__name__}: {error}"
        finest = list(figures.values())[-1]
        if note is None and finest["left"]:
            note = f"the job draws random numbers that can't be switched off ({', '.join(finest['left'])})"
        return {"figures": figures, "problem": finest["problem"], "note": note, "subject": subject(job)}

    found: dict[str, Any] = run_local(body, Cluster.local("cpu:0").devices, timeout_s=timeout_s)[0]
    if found["problem"] is not None:
        found["problem"] = Problem.from_dict(found["problem"])
    return found


def _certify(job: Job, plan: Plan, reference: dict[str, Any], folder: Path, *, timeout_s: float,
             asked_for: bool) -> Certificate:
    """Train under the plan with a recorder on every rank. A rank that fails is a problem, not an error."""
    from paceline.cluster import Cluster
    from paceline.launch.failure import RankFailed
    from paceline.launch.local import run_local
    from paceline.planner.resolve import resolve
    from paceline.runtime.drivers import crew

    if plan.relaxed is not None:
        return Certificate(str(plan), (), f"not compared: the plan is relaxed ({plan.relaxed}) and can't equal one "
                                          f"device; '{plan.exact}' can")
    devices = f"cpu:0-{plan.world_size - 1}"
    asked = resolve(job, plan, devices=devices)
    cuts = asked.plan.replicas > 1 or asked.plan.num_microbatches != 1
    problem = reference["problem"] if cuts else None
    try:
        ranks = run_local(_recorded(job, asked, list(reference["figures"]), folder), Cluster.local(devices).devices,
                          timeout_s=timeout_s, crew=crew(asked.plan))
    except RankFailed as error:
        if error.failure.is_stop:
            raise
        if error.failure.kind in _REFUSALS and not asked_for:
            return Certificate(str(plan), (), refused=error.failure.message)
        why = "\n".join(str(cause) for cause in (problem, error) if cause is not None)
        return Certificate(str(plan), (), why, reference["note"])
    verdicts = tuple(judge(figures, [rank[precision] for rank in ranks], precision=precision)
                     for precision, figures in reference["figures"].items())
    return Certificate(str(plan), verdicts, None if problem is None else str(problem), reference["note"])


def _recorded(job: Job, asked: Any, precisions: Sequence[Precision], folder: Path) -> Callable[[Any], dict[str, Any]]:
    """What each rank runs: the job in every precision, one after the other."""
    from paceline.capture.randomness import WithoutRandomness
    from paceline.runtime.drivers import train_rank
    from paceline.runtime.loop import Settings

    def body(context: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for precision in precisions:
            recorder = Recorder(folder / precision)
            with WithoutRandomness() as random:
                train_rank(context, _in_precision(job, precision, random), asked.plan,
                           Settings(None, asked.shares, observer=recorder))
            found[precision] = recorder.to_dict()
        return found

    return body
