"""The verb verify: does a plan compute what one device computes, on the user's own job?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.job import Job
from paceline.jobfile import JobFile
from paceline.plan import Plan
from paceline.proof.compare import Recorder, Verdict, judge

# What is tried when no plan is named: every axis, its stages, their product, uneven numbers, accumulation.
EXACT_PLANS = ("single accumulate=4", "data=2", "data=3", "data=2 shares=3:1", "shard=2 zero=1", "shard=2 zero=2",
               "shard=2", "data=2 shard=2", "data=2 accumulate=2 recompute=full")


@dataclass(frozen=True, slots=True)
class Certificate:
    """The verdict on one plan: in the job's own precision, and in float64, which tells a bug from rounding.

    problem: what keeps the plan from being judged or the job from being exact under any plan; None if nothing.
    """

    plan: str
    verdicts: tuple[Verdict, ...]
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None and bool(self.verdicts) and all(verdict.passed for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """The contract's fields, of the job's precision; `precisions` holds them for each."""
        shown = [{"precision": v.precision, "passed": v.passed, "max_loss_diff": v.max_loss_diff,
                  "max_gradient_diff": v.max_gradient_diff, "max_param_diff": v.max_param_diff,
                  "worst_param": v.worst_param, "steps": v.steps, "tolerance": v.tolerance, "difference": v.difference}
                 for v in self.verdicts]
        empty = {"max_loss_diff": None, "max_param_diff": None, "worst_param": None, "steps": 0, "tolerance": None}
        main = {key: shown[0][key] for key in empty} if shown else empty
        return {"plan": self.plan, "passed": self.passed, **main, "reason": self._reason(), "precisions": shown}

    def describe(self) -> str:
        """A line for the verdict, and lines for what differs."""
        mark = "passed" if self.passed else "FAILED"
        figures = "; ".join(f"{v.precision}: loss {v.max_loss_diff:.1e}, weights {v.max_param_diff:.1e}"
                            for v in self.verdicts)
        line = f"{mark}  {self.plan:<36} {figures}".rstrip()
        reason = self._reason()
        return f"{line}\n        {reason}" if reason else line

    def _reason(self) -> str | None:
        return self.problem or next((f"{v.precision}: {v.difference}" for v in self.verdicts if v.difference), None)


def verify(job: Job | JobFile, plans: Sequence[str | Plan] = (), *, steps: int = 4,
           timeout_s: float = 120.0) -> list[Certificate]:
    """Run the job for some steps on one device and under each plan, and compare losses, gradients and weights.

    Both start from the same initial weights and use the same global batches. Random layers are switched off. A
    difference may be ten times as large as what cutting the batch into micro-batches does on one device.

    Args:
        plans: Plans or their texts; by default those of `EXACT_PLANS` that the job has samples for.

    Raises:
        UsageError: a plan that can't be read or doesn't suit the job.
        PacelineError: the job fails on one device.
    """
    from paceline.strategies.compose import load

    loaded = job.load() if isinstance(job, JobFile) else job
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}")
    if loaded.total_steps is not None:
        steps = min(steps, loaded.total_steps)
    loaded = replace(loaded, steps=steps, epochs=None, validation=None, metrics={})
    chosen = [Plan.read(plan) for plan in plans] or _plans_that_fit(loaded)
    for plan in chosen:
        load(plan)
    found: dict[Plan, list[Verdict]] = {plan: [] for plan in chosen}
    problems: dict[Plan, str] = {}
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        for precision in dict.fromkeys((loaded.precision, "float64")):
            exact = replace(loaded, precision=precision)
            reference = _reference(exact, Path(folder), steps=steps, timeout_s=timeout_s)
            for plan in chosen:
                problem, verdict = _try(exact, plan, reference, Path(folder), timeout_s=timeout_s)
                problem = problem or reference["problem"]
                if problem:
                    problems.setdefault(plan, problem)
                if verdict:
                    found[plan].append(verdict)
    return [Certificate(str(plan), tuple(found[plan]), problems.get(plan)) for plan in chosen]


def _plans_that_fit(job: Job) -> list[Plan]:
    most = min(job.batch, job.num_samples or job.batch)
    return [plan for plan in map(Plan.parse, EXACT_PLANS) if plan.replicas <= most]


def _reference(job: Job, folder: Path, *, steps: int, timeout_s: float) -> dict[str, Any]:
    """One device's figures, computed in a process of its own so that this one stays free to fork."""
    from paceline.cluster import Cluster
    from paceline.launch.local import run_local
    from paceline.proof.randomness import WithoutDropout, silence
    from paceline.proof.reference import loss_problem, sample_marks, whole_batches, write_reference

    quiet = replace(job, model=lambda: silence(job.model()))

    def body(context: Any) -> dict[str, Any]:
        with WithoutDropout() as mode:
            figures = write_reference(quiet, folder, steps=steps)
            problem = loss_problem(quiet, steps=steps) or _coupling(quiet, figures)
        marks = [sample_marks(batch).tolist() for batch in whole_batches(quiet, steps)]
        return {**figures, "problem": problem, "marks": marks, "draws": sorted(mode.draws)}

    found: dict[str, Any] = run_local(body, Cluster.local("cpu:0").devices, timeout_s=timeout_s)[0]
    return found


def _coupling(job: Job, figures: dict[str, Any]) -> str | None:
    """Whether cutting the batch changes gradients by more than float64 can explain: samples see each other."""
    from torch.nn.modules.batchnorm import _BatchNorm

    if job.precision != "float64":
        return None
    largest = max(figures["gradient_size"][0].values(), default=0.0)
    moved = max(figures["gradient_spread"][0].items(), key=lambda item: item[1], default=("", 0.0))
    if moved[1] <= 1e-6 * largest:
        return None
    norms = [name for name, module in job.model().named_modules() if isinstance(module, _BatchNorm)]
    cause = (f"{len(norms)} BatchNorm layers, such as '{norms[0]}', use the statistics of a micro-batch" if norms
             else "a layer or the loss mixes samples")
    return (f"the job couples the samples of a batch: cutting it moves the gradient of '{moved[0]}' by {moved[1]:.2g} "
            f"on one device already ({cause}), so no plan that cuts the batch can equal one device. GroupNorm or "
            "LayerNorm instead of BatchNorm make the job exact")


def _try(job: Job, plan: Plan, reference: dict[str, Any], folder: Path, *,
         timeout_s: float) -> tuple[str | None, Verdict | None]:
    """Train under the plan with a recorder on every rank. A rank that fails is a problem, not an error."""
    from paceline.cluster import Cluster
    from paceline.launch.failure import RankFailed
    from paceline.launch.local import run_local
    from paceline.planner.resolve import resolve
    from paceline.proof.randomness import WithoutDropout, silence
    from paceline.runtime.loop import Settings, train_rank

    asked = resolve(job, plan, devices=f"cpu:0-{plan.world_size - 1}")
    quiet = replace(job, model=lambda: silence(job.model()))

    def body(context: Any) -> dict[str, Any]:
        recorder = Recorder(folder)
        with WithoutDropout():
            train_rank(context, quiet, asked.plan, Settings(None, asked.shares, observer=recorder))
        return recorder.to_dict()

    try:
        ranks = run_local(body, Cluster.local(f"cpu:0-{plan.world_size - 1}").devices, timeout_s=timeout_s)
    except RankFailed as error:
        return str(error), None
    verdict = judge(reference, ranks, precision=job.precision)
    if verdict.difference and reference["draws"]:
        drawn = ", ".join(reference["draws"])
        verdict = replace(verdict, difference=f"{verdict.difference} (the job draws random numbers itself: {drawn}; "
                                              "they differ between layouts and can't be switched off)")
    return None, verdict
