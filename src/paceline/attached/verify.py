"""Holds a script's own loop under a plan against the same script on one device, update by update.

A loop can't be run again piece by piece, so whole scripts are compared: on one device, on one device with the rows of
each batch in reverse order, which shows how far rounding alone moves each figure, and on the ranks of a plan. All
are in float64, and random operators return their means meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from paceline.attached.script import run_script
from paceline.attached.session import ScriptProcess
from paceline.base import tables
from paceline.base.errors import PlanError, UsageError
from paceline.base.temporary import temporary_folder
from paceline.job import Job
from paceline.launch.local.ranks import run_local
from paceline.launch.process.failure import RankFailed
from paceline.model.randomness import WithoutRandomness
from paceline.planner.resolve import resolve
from paceline.proof.compare import Furthest, off_by
from paceline.proof.order import few_samples
from paceline.proof.processes import names_of
from paceline.proof.reference_loop import greatest
from paceline.runs.documents import metrics_kind, read_lines
from paceline.runs.folder import METRICS
from paceline.strategies.compose import load
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.training.drivers import fault_policy
from paceline.training.settings import Settings

if TYPE_CHECKING:
    from paceline.launch.process.context import RankContext
    from paceline.training.feed import MicroBatch
    from paceline.training.state import StateOwner

ROUNDING = 1e-11  # of the greatest value of its kind, which float64 may lose in a few steps
TIMES = 10.0  # as often as rounding on one device, a plan may move a figure
KINDS = ("gradient", "weight")


@dataclass(frozen=True, slots=True)
class ScriptVerdict:
    """This holds what the comparison of a script under a plan found.

    Attributes:
        differences: Greatest differences from one device by kind: "loss", "gradient", "weight".
        problem: The first difference beyond its limit, or why the script failed; None if there is none.
        note: What the comparison does not show; "" if it shows everything.
    """

    plan: str
    steps: int
    differences: Mapping[str, float]
    problem: str | None
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.problem is None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    def describe(self) -> str:
        """Return a line for the verdict, and lines for what differs."""
        figures = ", ".join(f"{kind} {value:.1e}" for kind, value in self.differences.items())
        mark = "ok" if self.passed else "FAILED"
        return tables.verdict(mark, self.plan, figures, (self.problem or "", self.note))


def verify_script(
    script: str | Path,
    plans: Sequence[str | Plan] = ("data=2",),
    *,
    arguments: Sequence[str] = (),
    steps: int = 4,
    timeout_s: float = 120.0,
) -> list[ScriptVerdict]:
    """Run a script that calls `pl.attach` for some updates on one device and under each plan, and compare them.

    All ranks are on CPUs. Compared are the loss, the gradients before clipping and the weights of each
    update, on every rank; what the script logs and evaluates; and whether ranks draw alike. The data
    is cut so that these steps have the short last batch of an epoch.

    Args:
        steps: How many updates are compared. The script runs on to its end without further ones.

    Raises:
        UsageError: a plan can't be read or has more ranks than rows, or there is no script.
        RankFailed: the script fails on one device.
    """
    path = Path(script)
    if not path.is_file():
        raise UsageError(f"there is no script {path}")
    chosen = [Plan.read(plan) for plan in plans]
    with temporary_folder("verify") as folder:
        run = _Runs(path, arguments, steps, timeout_s, folder)
        try:
            reference = run("single", Plan.read("single"))
        except RankFailed as failed:
            if "Double" in str(failed) or "float64" in str(failed):
                failed.hint = (
                    "a proof runs the script in float64: let tensors take the dtype of others, "
                    "x.to(weight.dtype), in place of .float() and dtype=torch.float32"
                )
            raise
        reversed_rows = run("reversed", Plan.read("single"), reverses=True)
        limits = _Limits(reference[0], reversed_rows[0])
        verdicts = []
        for number, plan in enumerate(chosen):
            try:
                records = run(f"plan-{number}", plan)
            except (RankFailed, PlanError) as error:
                verdicts.append(ScriptVerdict(str(plan), 0, {}, str(error)))
                continue
            verdicts.append(_judge(plan, reference[0], records, limits))
    return verdicts


@dataclass(frozen=True)
class Record:
    """What one rank computed. Its tensors are files of a folder in its run's."""

    folder: Path
    losses: list[float]
    drawn: list[list[int]]  # by step

    @property
    def told(self) -> dict[tuple[int, str, str], list[float]]:
        """What the run told of each step, by step, kind and name."""
        told: dict[tuple[int, str, str], list[float]] = {}
        for row in read_lines(self.folder.parent / METRICS, metrics_kind):
            for kind in ("logged", "evaluated"):
                for name, value in row.get(kind, {}).items():
                    values = told.setdefault((row["step"], kind, name), [])
                    values.append(math.nan if value is None else value)
        return told

    def tensors(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients and weights of a step, from 0, by names KIND/NAME."""
        with safe_open(self.folder / f"{step}.safetensors", framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


class Recorder:
    """Writes down what a rank computes; see `training.settings.Observer`."""

    def __init__(self, folder: Path, steps: int, random: WithoutRandomness) -> None:
        self.folder, self.steps, self.random = folder, steps, random
        self.losses: list[float] = []
        self.drawn: list[list[int]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        folder.mkdir(parents=True)

    def initial(self, stepper: StateOwner) -> None: ...

    def samples(self, step: int, batches: list[MicroBatch]) -> None:
        self.random.forget()  # what data sets draw is keyed by the sample

    def gradients(self, step: int, stepper: StateOwner) -> None:
        gradients = {
            name: p.grad for name, p in stepper.local_parameters.items() if p.grad is not None
        }
        self._tensors = {f"gradient/{name}": _whole(each) for name, each in gradients.items()}

    def weights(self, step: int, stepper: StateOwner, loss: float) -> bool:
        self._tensors |= {
            f"weight/{name}": _whole(p) for name, p in stepper.local_parameters.items()
        }
        save_file(self._tensors, self.folder / f"{step}.safetensors")
        self.losses.append(loss)
        self.drawn.append(list(self.random.drawn))
        return len(self.losses) == self.steps


def _whole(tensor: Any) -> torch.Tensor:
    """Return a tensor whole, on the CPU. Collective if ranks hold parts of it."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().to("cpu", copy=True).contiguous()


@dataclass(frozen=True)
class _Runs:
    """Runs the script, and returns the records of its ranks."""

    script: Path
    arguments: Sequence[str]
    steps: int
    timeout_s: float
    folder: Path

    def __call__(self, name: str, plan: Plan, *, reverses: bool = False) -> list[Record]:
        run_dir = self.folder / name
        resolved = resolve(None, plan, devices=names_of(None, plan.world_size))
        load(resolved.plan)
        run_dir.mkdir()

        def shortened(job: Job) -> Job:
            if reverses:
                collate: Any = job.collate
                job = replace(job, collate=lambda items: collate(items[::-1]))
            return few_samples(job, self.steps)

        def body(context: RankContext) -> Any:
            random = WithoutRandomness()
            recorder = Recorder(run_dir / f"rank-{context.rank}", self.steps, random)
            session = ScriptProcess(
                context,
                resolved.plan,
                Settings(
                    run_dir,
                    resolved.shares,
                    devices=resolved.rank_devices,
                    observer=recorder,
                    keep=lambda: False,
                ),
                precision="float64",
                change=shortened,
                around=random,
            )
            run_script(session, self.script, self.arguments)
            return {"losses": recorder.losses, "drawn": recorder.drawn}

        documents = run_local(
            body,
            resolved.cluster.devices,
            run_dir=run_dir,
            timeout_s=self.timeout_s,
            fault_policy=fault_policy(resolved.plan),
        )
        return [Record(run_dir / f"rank-{rank}", **each) for rank, each in enumerate(documents)]


class _Limits:
    """Return how far a figure may be from one device's."""

    def __init__(self, reference: Record, reversed_rows: Record) -> None:
        self.moved: dict[tuple[int, str], float] = {}
        self.greatest = dict.fromkeys(KINDS, 0.0)
        self.couples = False  # whether the script's result depends on the order of rows in a batch
        for step in range(len(reference.losses)):
            other = dict(reversed_rows.tensors(step))
            for name, tensor in reference.tensors(step):
                kind = name.partition("/")[0]
                self.greatest[kind] = max(self.greatest[kind], greatest([tensor]))
                self.moved[step, name] = _off(tensor, other.get(name))
        first = [
            off for (step, name), off in self.moved.items() if not step and "gradient/" in name
        ]
        if max(first, default=0.0) > 1e3 * ROUNDING * self.greatest["gradient"]:
            self.couples, self.moved = True, {}

    def of(self, step: int, name: str) -> float:
        floor = ROUNDING * self.greatest[name.partition("/")[0]]
        return TIMES * self.moved.get((step, name), 0.0) + floor


def _judge(plan: Plan, reference: Record, records: list[Record], limits: _Limits) -> ScriptVerdict:
    """Compare every rank's record with that of one device."""
    steps = min(len(reference.losses), *(len(record.losses) for record in records))
    differences = dict.fromkeys(("loss", *KINDS), 0.0)
    problems = list[str]()
    for step in range(steps):
        problems += _of_step(plan, reference, records, limits, step, differences)
        if problems:
            break
    if not problems and steps < len(reference.losses):
        problems.append(
            f"ranks took {steps} steps, and one device took {len(reference.losses)} of the same length"
        )
    problems = problems or list(_in_what_is_told(reference, records[0]))
    note = (
        "the gradients of one device change with the order of rows in a batch: rows are compared or "
        "mixed, so that parts of a batch may compute something else"
        if limits.couples
        else ""
    )
    return ScriptVerdict(str(plan), steps, differences, "\n".join(problems) or None, note)


def _of_step(
    plan: Plan,
    reference: Record,
    records: Sequence[Record],
    limits: _Limits,
    step: int,
    differences: dict[str, float],
) -> Iterator[str]:
    """Yield what is wrong in a step, the first cause first. Notes the greatest differences."""
    replicas = [Mesh.of(plan, rank).replica for rank in range(len(records))]
    for other in range(len(records)):
        for rank in range(other):
            if replicas[rank] != replicas[other] and set(records[rank].drawn[step]) & set(
                records[other].drawn[step]
            ):
                yield (
                    f"ranks {rank} and {other} draw the same random numbers in step {step + 1}: "
                    "something seeds them alike (torch.manual_seed in the loop), and their samples differ"
                )
                return
    expected = dict(reference.tensors(step))
    # Ranks of a plan that splits the model hold some of it each.
    elsewhere = {
        name for record in records for name, _ in record.tensors(step) if plan.splits_model
    }
    offs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    allowed: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for record in records:
        held = dict(record.tensors(step))
        for kind in KINDS:
            offs[kind].append({})
        for full_name, tensor in expected.items():
            kind, _, name = full_name.partition("/")
            allowed[kind][name] = limits.of(step, full_name)
            if full_name in held or full_name not in elsewhere:
                off = offs[kind][-1][name] = _off(tensor, held.get(full_name))
                differences[kind] = max(differences[kind], off)
    for kind in KINDS:
        furthest = Furthest.of(allowed[kind], offs[kind], step)
        if furthest.excess > 1.0:
            yield f"the {furthest.describe(kind, num_ranks=len(records))}"
            break
    loss = reference.losses[step]
    off = max(abs(record.losses[step] - loss) for record in records)
    differences["loss"] = max(differences["loss"], off)
    if not off <= 1e3 * ROUNDING * max(abs(loss), 1.0):
        yield (
            f"the loss of step {step + 1} is {records[0].losses[step]:.9g} and {loss:.9g} on one device"
        )


def _in_what_is_told(reference: Record, record: Record) -> Iterator[str]:
    """Yield the first figure that the script told and that differs."""
    told = record.told
    for (step, kind, name), values in reference.told.items():
        others = told.get((step, kind, name), [])
        for value, other in zip_longest(values, others[: len(values)], fillvalue=math.nan):
            if not abs(other - value) <= 1e3 * ROUNDING * max(abs(value), 1.0):
                verb = "run.log" if kind == "logged" else "run.evaluate"
                yield (
                    f"'{name}' of {verb} after step {step} is {other:.9g} and {value:.9g} on one device: it "
                    "must be a mean over the rows that it is given, or (sum, count)"
                )
                return


def _off(tensor: torch.Tensor, other: torch.Tensor | None) -> float:
    if other is None or other.shape != tensor.shape:
        return math.inf
    return off_by(other, tensor)
