"""The verb verify: does a plan compute what one device computes, on the user's own job?"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.api import checks
from paceline.base import tables
from paceline.base.errors import (
    NotDeterministic,
    PlanError,
    PlanRefused,
    UsageError,
    nearest,
    with_hint,
)
from paceline.base.signatures import renamed
from paceline.base.temporary import temporary_folder
from paceline.cluster.accelerators import gpus, unused
from paceline.cluster.cluster import Cluster
from paceline.job import Job, Precision
from paceline.job.file import AnyJob, JobFile, open_job
from paceline.launch.process.failure import RankFailed
from paceline.planner.resolve import Resolved, resolve
from paceline.proof import certificate
from paceline.proof.compare import Furthest, Verdict, judge
from paceline.proof.order import few_samples
from paceline.proof.problems import Problem
from paceline.proof.processes import (
    RUNS,
    Proof,
    cut_reference,
    names_of,
    num_devices,
    recomputed_forwards,
    reference_of,
    watched,
)
from paceline.proof.reference_loop import BatchCut
from paceline.runs.folder import writable
from paceline.strategies.compose import load
from paceline.strategies.plan import Plan

# Plans that are tried if none is named: every axis, its stages, their products, uneven numbers,
# accumulation.
EXACT_PLANS = (
    "single microbatches=4",
    "data=2",
    "data=3",
    "data=2 shares=3:1",
    "shard=2 zero=1 microbatches=2",
    "shard=2 zero=2",
    "shard=2",
    "data=2 shard=2",
    "data=2 microbatches=2 recompute=full",
    "pipeline=2",
    "pipeline=3 schedule=zero-bubble",
    "pipeline=2 schedule=interleaved",
    "pipeline=2 schedule=zero-bubble",
    "tensor=2",
    "place=2",
    "pipeline=2 data=2 schedule=gpipe",
    "pipeline=2 shard=2",
    "data=2 tensor=2",
    "pipeline=2 data=2 tensor=2",
)
Resume = Literal["short", "full", "no"]
# What a document says of a verdict, and of a plan's first verdict once more.
_MAIN = ("max_loss_diff", "max_param_diff", "worst_param", "steps", "tolerance")
_SHOWN = (*_MAIN, "precision", "passed", "max_gradient_diff", "max_buffer_diff", "difference")
_REFUSALS = (PlanError.__name__, PlanRefused.__name__, NotDeterministic.__name__, "CaptureFailed")


@dataclass(frozen=True, slots=True)
class Certificate:
    """The verdict on one plan: in the job's own precision, and in float64, which tells a bug from
    rounding.
    """

    plan: str
    verdicts: tuple[Verdict, ...]
    # Why the plan can't be judged, or why the job is exact under no plan; None if nothing is wrong.
    problem: str | None = None
    note: str | None = None  # what the verdict does not cover; None if it covers everything
    # why the plan does not apply to this model; it neither passes nor fails
    refused: str | None = None
    # Why the plan computes something else than one device, although it equals one device that cuts
    # the batch in the same way.
    coupling: str | None = None
    # Set if loss scaling skips other steps with cut batches than with whole ones, so that the plan
    # is compared with one device that cuts each batch in the same way; None if it skips the same
    # steps.
    overflow: str | None = None
    # why the comparison would not have noticed an error; None if it would
    weakness: str | None = None
    # the plan that wrote the checkpoint from which this one went on; None if it did not
    resumed_from: str | None = None
    power: dict[str, Any] | None = field(default=None)
    asked_for: bool = False  # whether the user named the plan

    @property
    def verdict(self) -> str:
        """The verdict in a word: "passed", "failed", "coupled", "inconclusive" or "refused"."""
        if self.refused is not None:
            return "refused"
        if (
            self.problem is not None
            or not self.verdicts
            or not all(verdict.passed for verdict in self.verdicts)
        ):
            return "failed"
        if self.coupling is not None:
            return "coupled"
        return "passed" if self.weakness is None else "inconclusive"

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"

    def to_dict(self) -> dict[str, Any]:
        """Return the contract's fields for the job's precision; `precisions` holds them for each
        precision.

        `worst` is the loss, gradient or weight that used up most of its limit.
        """
        shown = [
            {
                **{name: getattr(v, name) for name in _SHOWN},
                "worst": {
                    kind: _as_dict(getattr(v, kind)) for kind in ("loss", "gradient", "weight")
                },
            }
            for v in self.verdicts
        ]
        empty = {**dict.fromkeys(_MAIN), "steps": 0}
        main = {key: shown[0][key] for key in empty} if shown else empty
        return {
            "plan": self.plan,
            "passed": self.passed,
            "verdict": self.verdict,
            **main,
            "reason": self.reason,
            "overflow": self.overflow,
            "note": self.note,
            "refused": self.refused,
            "asked_for": self.asked_for,
            "resumed_from": self.resumed_from,
            "power": self.power,
            "precisions": shown,
        }

    @property
    def reason(self) -> str | None:
        """The reason why the plan did not pass; None if it did."""
        differences = (f"{v.precision}: {v.difference}" for v in self.verdicts if v.difference)
        return self.problem or next(differences, None) or self.coupling or self.weakness

    def describe(self) -> str:
        """Return a line for the verdict, and lines for what differs."""
        if self.refused is not None:
            reason, *more = self.refused.splitlines()
            return tables.verdict("no plan", self.plan, reason, more if self.asked_for else ())
        figures = "; ".join(
            f"{v.precision}: loss {v.max_loss_diff:.1e}, weights {v.max_param_diff:.1e}"
            for v in self.verdicts
        )
        remarks = filter(None, (self.reason, self.overflow, self.note))
        return tables.verdict(certificate.MARKS[self.verdict], self.plan, figures, remarks)


def _as_dict(furthest: Furthest) -> dict[str, Any]:
    return {
        "name": furthest.name or None,
        "step": furthest.step + 1,
        "diff": furthest.off,
        "tolerance": furthest.allowed,
    }


@renamed(resume="restore")
def verify(
    job: AnyJob,
    plans: Sequence[str | Plan] = (),
    *,
    steps: int = 4,
    run: str | Path | None = None,
    restore: Resume = "short",
    devices: str | None = None,
    timeout_s: float = 120.0,
) -> list[Certificate]:
    """Run the job for some steps on one device and under each plan, and compare what they compute
    and keep.

    Both start from the same initial weights and use the same global batches. Random layers are
    switched off. A difference may be ten times as large as what rounding does on one device;
    docs/verify.md says how it is measured.

    Args:
        job: As in `train`.
        plans: A plan to prove; by default exact ones that suit the job. Those are the plans of
            `EXACT_PLANS` for which the job has enough samples and the named devices are enough.
        steps: Number of optimizer steps that are compared.
        run: The folder of `certificate.json` and `certificate.txt`. It is created if necessary; without
            it none is written.
        restore: Which plans also go on from another plan's checkpoint: the first on each axis, all, or
            none. The checkpoint is of an odd step. Plans that the user names all do, unless it is
            "no".
        devices: Names such as cuda:0-3, of which the first one is what plans are compared with. A plan
            uses as many as it has ranks, beginning with the first one. A GPU then uses
            deterministic algorithms. By default CPUs, as many as each plan has ranks.
        timeout_s: As in `train`.

    Raises:
        UsageError: a plan can't be read, doesn't suit the job or has more ranks than there are
            devices; a device isn't there; or a folder can't be written.
        PacelineError: the job fails on one device.
    """
    file, loaded = open_job(job)
    source = file.to_dict() if run is not None and file is not None else None
    _check(steps, restore)
    named = _devices_here(devices)
    chosen = [Plan.read(plan) for plan in plans] or _plans_that_fit(loaded, named)
    _check_ranks(chosen, named)
    for plan in chosen:
        load(plan)
    num_samples, length = loaded.num_samples, min(steps, loaded.total_steps or steps)
    loaded = few_samples(replace(loaded, steps=length, epochs=None), length)
    saved_step = (
        max((step for step in range(1, length) if step % 2), default=0) if restore != "no" else 0
    )
    written = writable(Path(run)) if run is not None else None
    with temporary_folder("verify") as folder:
        reference = reference_of(
            loaded, folder, saved_step=saved_step, timeout_s=timeout_s, devices=named
        )
        proof = Proof(loaded, folder, saved_step, reference["figures"], timeout_s, named)
        hops = _hopping(chosen) if restore == "short" and not plans else set(range(len(chosen)))
        certificates = list(
            _certificates(
                proof, chosen, reference, hops=hops if saved_step else set(), asked_for=bool(plans)
            )
        )
    if file is not None:
        _remember(file, loaded, certificates, named)
    if written is not None:
        certificate.write(
            written, _document(loaded, source, reference, certificates, num_samples, named)
        )
    return certificates


def _remember(
    source: JobFile, job: Job, certificates: Sequence[Certificate], devices: Sequence[str] | None
) -> None:
    """Remember the proved plans: runs under them, on devices of the same kind, need no check of
    their first update.
    """
    for each in certificates:
        if each.verdict in ("passed", "coupled"):
            plan = Plan.parse(each.plan)
            resolved = resolve(job, plan, devices=names_of(devices, num_devices(plan, devices)))
            checks.remember(source, resolved, verdict=each.verdict, reason=each.coupling or "")


def _check(steps: int, restore: str) -> None:
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}")
    if restore not in get_args(Resume):
        raise UsageError(f"restore {restore!r}: {nearest(restore, get_args(Resume))}")


def _devices_here(devices: str | None) -> tuple[str, ...] | None:
    """Return the devices by name, each of which is here; None if none are named.

    Prints a line if GPUs are left out of a proof.
    """
    if devices is not None:
        return tuple(str(device) for device in Cluster.local(devices).devices)
    if num_gpus := len(gpus()):
        print(
            f"one device and all ranks are on the CPU; --devices cuda:0{f'-{num_gpus - 1}' * (num_gpus > 1)} proves "
            "plans on GPUs",
            file=sys.stderr,
            flush=True,
        )
    elif reason := unused():
        print(reason, file=sys.stderr, flush=True)
    return None


def _plans_that_fit(job: Job, devices: Sequence[str] | None) -> list[Plan]:
    most = min(job.batch, job.num_samples or job.batch)
    return [
        plan
        for plan in map(Plan.parse, EXACT_PLANS)
        if plan.replicas <= most and (devices is None or num_devices(plan, devices) <= len(devices))
    ]


def _check_ranks(plans: Sequence[Plan], devices: Sequence[str] | None) -> None:
    if devices is not None and (
        large := [plan for plan in plans if num_devices(plan, devices) > len(devices)]
    ):
        needs = "; ".join(f"plan '{plan}' has {plan.world_size} ranks" for plan in large)
        raise PlanError(
            f"{needs}, and --devices names {len(devices)} device{'s' * (len(devices) > 1)}: "
            f"{', '.join(devices)}",
            hint=f"plans of at most {len(devices)} rank{'s' * (len(devices) > 1)}, or no --devices: CPU "
            "ranks may be as many as a plan asks for",
        )


def _hopping(plans: Sequence[Plan]) -> set[int]:
    """Return the numbers of the plans that also resume: the first one on each axis, among plans
    with at most one axis.

    Plans with several axes save and restore in the same way as these.
    """
    first: dict[tuple[str, ...], int] = {}
    for number, plan in enumerate(plans):
        axes = tuple(axis for axis, size in plan.axes.sizes().items() if size > 1)
        if len(axes) <= 1:
            first.setdefault(axes, number)
    return set(first.values())


def _document(
    job: Job,
    source: dict[str, Any] | None,
    reference: dict[str, Any],
    certificates: Sequence[Certificate],
    num_samples: int | None,
    devices: Sequence[str] | None,
) -> dict[str, Any]:
    """Return everything that the certificates are based on, for a file."""
    subject = dict(reference["subject"])
    if devices is not None:
        subject["device"] = {
            **subject["device"],
            "ranks": list(devices),
            "nondeterministic": reference["nondeterministic"],
        }
    return certificate.document(
        subject,
        [each.to_dict() for each in certificates],
        job=source,
        run={
            "steps": job.steps,
            "batch": job.batch,
            "seed": job.seed,
            "precision": job.precision,
            "clip": job.clip,
            "optimizer": subject.pop("optimizer"),
            "samples": num_samples,
        },
        yardstick={
            precision: figures["yardstick"] for precision, figures in reference["figures"].items()
        },
        coupling=reference["problem"],
        note=reference["note"],
    )


def _certificates(
    proof: Proof,
    plans: Sequence[Plan],
    reference: dict[str, Any],
    *,
    hops: set[int],
    asked_for: bool,
) -> Iterator[Certificate]:
    checkpoint = ("single", proof.folder / RUNS / "single")
    for number, plan in enumerate(plans):
        if reference["order"] is not None:
            yield Certificate(
                str(plan), (), f"the order of data is not the documented one: {reference['order']}"
            )
            continue
        certificate = _certify(
            proof,
            plan,
            reference,
            number=number,
            asked_for=asked_for,
            checkpoint=checkpoint if number in hops else None,
        )
        if certificate.passed and proof.saved_step:
            checkpoint = (str(plan), proof.folder / RUNS / str(number))
        yield certificate


def _certify(
    proof: Proof,
    plan: Plan,
    reference: dict[str, Any],
    *,
    number: int,
    asked_for: bool,
    checkpoint: tuple[str, Path] | None,
) -> Certificate:
    """Train under the plan with a recorder on every rank. A rank that fails is a problem, not an
    error.
    """
    if plan.relaxed is not None:
        return Certificate(
            str(plan),
            (),
            f"not compared: the plan is relaxed ({plan.relaxed}) and can't equal one "
            f"device; '{plan.exact}' can",
        )
    resolved = resolve(
        proof.job, plan, devices=names_of(proof.devices, num_devices(plan, proof.devices))
    )
    problem = Problem.from_dict(reference["problem"]) if reference["problem"] is not None else None
    trial = _Trial(proof, resolved, number, checkpoint, reference["note"])
    try:
        return trial.certificate(problem)
    except RankFailed as error:
        if error.failure.is_stop:
            raise
        if error.failure.kind in _REFUSALS:
            refused = with_hint(error.failure.message, error.hint)
            return Certificate(str(plan), (), refused=refused, asked_for=asked_for)
        why = "\n".join(
            str(cause)
            for cause in (problem if not trial.cut.is_whole else None, error)
            if cause is not None
        )
        return Certificate(str(plan), (), why, reference["note"])


@dataclass
class _Trial:
    """One plan under proof."""

    proof: Proof
    resolved: Resolved
    number: int
    checkpoint: tuple[str, Path] | None  # the plan that wrote it, and its run folder
    note: str | None

    @cached_property
    def cut(self) -> BatchCut:
        return BatchCut.of(self.resolved)

    def certificate(self, problem: Any) -> Certificate:
        """Compare the plan with one device, and return the certificate.

        If the plan cuts the batch and either the job couples samples or smaller parts overflow in
        other steps, the plan is compared with one device that cuts in the same way.
        """
        whole = self.proof.figures
        if (
            problem is None or self.resolved.plan.num_microbatches == 1
        ):  # replicas may join what couples samples
            certificate = self._judged(whole, resumes=True)
            if certificate.passed or self.cut.is_whole:
                return certificate
        try:
            figures = cut_reference(self.proof, self.cut)
        except (
            RankFailed
        ) as error:  # a batch cut so is no batch for the job: the plan says so itself
            if error.failure.is_stop:
                raise
            return self._judged(whole, resumes=True)
        coupled = next((f["coupling"] for f in reversed(figures.values()) if f["coupling"]), None)
        if coupled is not None:
            certificate = replace(
                self._judged(figures, resumes=False), coupling=_coupling(problem, coupled)
            )
        elif problem is not None or any(each["overflow"] for each in figures.values()):
            certificate = self._uncoupled(
                {
                    precision: each if each["overflow"] else whole[precision]
                    for precision, each in figures.items()
                },
                problem,
            )
        return replace(certificate, overflow=_overflow(figures))

    def _uncoupled(self, figures: dict[Precision, dict[str, Any]], problem: Any) -> Certificate:
        """Judge a plan if no training step shows that cutting a batch matters, except for
        overflows.

        Args:
            figures: Of one device, by precision.
        """
        certificate = self._judged(figures, resumes=True)
        if certificate.passed or problem is None:
            return certificate
        trained = self._judged(
            {precision: {**each, "evaluation": {}} for precision, each in figures.items()},
            resumes=False,
        )
        if trained.passed:  # what a forward changes of the model first shows after the last step
            return replace(trained, coupling=_coupling(problem, "evaluation after the last step"))
        return replace(certificate, problem=f"{problem}\n{certificate.reason}")

    def _judged(self, figures: Mapping[Precision, dict[str, Any]], *, resumes: bool) -> Certificate:
        name, folder = self.checkpoint if self.checkpoint and resumes else (None, None)
        ranks = watched(self.proof, self.resolved, figures, number=self.number, resumed_from=folder)
        finest, forwards = self.proof.finest, recomputed_forwards(self.resolved.plan)
        verdicts = [
            judge(each, [rank[precision] for rank in ranks], precision=precision, forwards=forwards)
            for precision, each in figures.items()
        ]
        last = verdicts[-1]
        if last.passed and (changed := ranks[0].get("file")):
            verdicts[-1] = replace(last, difference=changed)
        elif last.passed and folder is not None:
            resumed = judge(
                figures[finest],
                [rank["resumed"] for rank in ranks],
                precision=finest,
                forwards=forwards,
            )
            if resumed.difference is not None:
                verdicts[-1] = replace(
                    last,
                    difference=(
                        f"resumed after step {self.proof.saved_step} from a checkpoint that '{name}' wrote: "
                        f"{resumed.difference}"
                    ),
                )
        power = figures[finest]["power"]
        return Certificate(
            str(self.resolved.plan),
            tuple(verdicts),
            note=self.note,
            weakness=_weakness(power, finest),
            resumed_from=name,
            power=power,
        )


def _coupling(problem: Any, difference: str) -> str:
    """Return why a correct plan computes something else than one device."""
    return (
        "the plan equals one device that cuts each batch alike, but not one that doesn't: cutting moves the "
        f"{difference} on one device already. {problem or 'The job couples the samples of a batch'}"
    )


def _overflow(figures: Mapping[Precision, Mapping[str, Any]]) -> str | None:
    """Return a note that loss scaling skips other steps under the plan; None if it does not.

    The plan is then compared with one device that cuts each batch in the same way.
    """
    overflow = next((each["overflow"] for each in figures.values() if each["overflow"]), None)
    return (
        overflow
        and f"{overflow}; so in fp16 the plan is held against one device that cuts each batch alike"
    )


def _weakness(power: dict[str, Any], precision: str) -> str | None:
    """Return why a comparison proves nothing; None if planted errors would have been noticed."""
    if 2 * power["caught"] >= power["gradients"] > 0 and power["dropped"] is not False:
        return None
    if power["gradients"] and 2 * power["caught"] < power["gradients"]:
        return (
            f"the comparison has no power: an error of {power['planted']:.1%} would have been noticed in "
            f"{power['caught']} of {power['gradients']} gradients alone, for rounding moves the others as far in "
            f"{precision}; not in '{power['missed'][0]}', for one"
        )
    return (
        "the comparison has no power: a window without its last quarter gives the same gradients"
        if power["gradients"]
        else "the comparison has no power: every gradient is noise or zero"
    )
