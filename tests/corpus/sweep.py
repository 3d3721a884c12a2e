"""Runs plans over jobs and says of each pair what came of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import paceline
from paceline.base.errors import PacelineError, UsageError
from paceline.cluster.cluster import Cluster
from paceline.launch.local.ranks import run_local
from paceline.launch.process.failure import RankFailed
from paceline.model.randomness import WithoutRandomness
from paceline.planner.resolve import Resolved, resolve
from paceline.strategies.plan import Plan
from paceline.training.drivers import fault_policy, train_rank
from paceline.training.settings import Settings

from .plain import WHOLE, Cut, Outcome, run_by_hand, run_plainly
from .registry import Entry

PLANS = (
    "single",
    "data=2",
    "data=3",
    "data=2 shares=3:1",
    "single microbatches=4",
    "shard=2 zero=1",
    "shard=2 zero=2",
    "shard=2",
    "data=2 shard=2",
    "single recompute=full",
    "data=2 microbatches=2 recompute=full",
    "tensor=2",
    "data=2 tensor=2",
    "pipeline=2 microbatches=1",
    "pipeline=2",
    "pipeline=3",
    "pipeline=2 schedule=zero-bubble",
    "pipeline=2 schedule=interleaved",
    "pipeline=2 shard=2",
    "place=2",
    "servers=1 workers=2",
)
EXACT, COUPLED, REFUSED, WRONG = "exact", "coupled", "refused", "wrong"
REFUSALS = {"PlanError", "PlanRefused", "CaptureFailed", "JobError", "UsageError"}
# Relative to the largest number of a tensor, and absolute below 1.
TOLERANCES = {"float64": 1e-9, "float32": 2e-4, "bf16": 5e-2}
POOL_JOBS = 12  # that ranks run before they are forked anew, as each leaves process groups and their threads behind
MODEL, METRICS, SUMMARY, REFUSAL = (
    "model.safetensors",
    "metrics.jsonl",
    "corpus-summary.json",
    "refusal.txt",
)
REFUSAL_S = 5.0  # for the other ranks to refuse a job too

_ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Cell:
    """What came of a job under a plan.

    reason: why it was refused or is wrong, else how far it is from one device. steps: updates before it was refused.
    trace: the whole message of a failure.
    """

    job: str
    plan: str
    verdict: str
    reason: str = ""
    off: float | None = None
    steps: int = 0
    seconds: float = 0.0
    trace: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Reference:
    """One device's outcome of a job, or why it has none."""

    outcome: Outcome | None
    failure: str = ""


@dataclass
class Sweep:
    """A run over jobs and plans. folder: for what runs leave. timeout_s: how long a rank may be silent."""

    folder: Path
    timeout_s: float = 60.0
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
    references: dict[tuple[str, Cut], Reference] = field(default_factory=dict)

    def run(self, jobs: Sequence[Entry], plans: Sequence[str]) -> list[Cell]:
        """A cell for each pair, in the order of plans and then jobs."""
        self.learn([(entry, WHOLE) for entry in jobs])
        cells: list[Cell] = []
        for plan in plans:
            started_s = time.monotonic()
            under = [self._settled(entry, plan, cell) for entry, cell in self._under(jobs, plan)]
            count = {
                verdict: sum(cell.verdict == verdict for cell in under)
                for verdict in (EXACT, COUPLED, REFUSED, WRONG)
            }
            self.say(
                f"{plan:<36} {', '.join(f'{n} {v}' for v, n in count.items() if n)}, "
                f"{time.monotonic() - started_s:.0f} s"
            )
            for cell in under:
                if cell.verdict == WRONG:
                    self.say(f"    wrong: {cell.job}: {cell.reason}")
            cells += under
        return cells

    def learn(self, wanted: Sequence[tuple[Entry, Cut]]) -> None:
        """Run the plain loop for these, in a process of its own: this one stays free to fork."""
        missing = [
            (entry, cut) for entry, cut in wanted if (entry.name, cut) not in self.references
        ]
        if not missing:
            return
        preload([entry for entry, _ in missing])

        def body(context: Any) -> list[dict[str, Any]]:
            return [
                _plain_figures(entry, cut, self.folder / f"plain-{number}.safetensors", context)
                for number, (entry, cut) in enumerate(missing)
            ]

        figures = run_local(body, Cluster.local("cpu:0").devices, timeout_s=600.0)[0]
        for number, ((entry, cut), plain_figures) in enumerate(zip(missing, figures, strict=True)):
            path = self.folder / f"plain-{number}.safetensors"
            outcome = None
            if not plain_figures["failure"]:
                outcome = Outcome(
                    load_file(path), plain_figures["losses"], plain_figures["validation_loss"]
                )
                path.unlink()
            self.references[entry.name, cut] = Reference(outcome, plain_figures["failure"])

    def _under(self, jobs: Sequence[Entry], plan: str) -> list[tuple[Entry, Cell]]:
        """Cells before what couples samples is looked at; what fails among others is tried again by itself."""
        cells_by_job: dict[str, Cell] = {}
        waiting: list[tuple[Entry, Resolved]] = []
        for entry in jobs:
            try:
                waiting.append((entry, _resolved(entry.make(), plan)))
            except UsageError as error:
                cells_by_job[entry.name] = Cell(entry.name, plan, REFUSED, first_line(error))
        while waiting:
            batch, waiting = waiting[:POOL_JOBS], waiting[POOL_JOBS:]
            done = self._pool(batch, plan)
            cells_by_job |= {cell.job: cell for cell in done}
            waiting = batch[len(done) :] + waiting
        for entry in jobs:
            cell = cells_by_job[entry.name]
            if cell.verdict == WRONG and cell.off is None:
                cells_by_job[entry.name] = self._alone(entry, plan)
        return [(entry, cells_by_job[entry.name]) for entry in jobs]

    def _pool(self, batch: Sequence[tuple[Entry, Resolved]], plan: str) -> list[Cell]:
        """Run jobs one after the other in ranks that are forked once, up to the first that fails. One cell at least."""
        folder = self.folder / "pool"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        num_ranks = batch[0][1].plan.world_size

        def body(context: Any) -> None:
            for number, (entry, resolved) in enumerate(batch):
                (folder / f"rank-{context.rank}").write_text(str(number))
                context.step = 0
                context.beat("start")
                try:
                    _train_on_rank(context, entry, resolved, folder / str(number))
                except UsageError as error:
                    if _lines(folder / str(number)) or not _all_ranks_refuse(context, number):
                        raise
                    (folder / str(number) / REFUSAL).write_text(str(error))
            (folder / f"rank-{context.rank}").write_text(str(len(batch)))

        started_s, failed = time.monotonic(), None
        try:
            run_local(
                body,
                Cluster.local(f"cpu:0-{num_ranks - 1}").devices,
                timeout_s=self.timeout_s,
                fault_policy=fault_policy(batch[0][1].plan),
            )
        except RankFailed as error:
            failed = error
        reached = len(batch)
        if failed is not None:
            reached = int((folder / f"rank-{failed.failure.rank}").read_text())
        cells = [
            self.compared(entry, plan, folder / str(number))
            for number, (entry, _) in enumerate(batch[:reached])
        ]
        if failed is not None:
            entry = batch[reached][0]
            cells.append(failed_cell(entry, plan, failed, folder / str(reached)))
        for cell in cells:
            cell.seconds = (time.monotonic() - started_s) / len(cells)
        return cells

    def _alone(self, entry: Entry, plan: str) -> Cell:
        """The job under the plan as a user would train it."""
        run, started_s = self.folder / "alone", time.monotonic()
        shutil.rmtree(run, ignore_errors=True)
        try:
            train_quietly(entry, plan, run, timeout_s=self.timeout_s)
            cell = self.compared(entry, plan, run)
        except PacelineError as error:
            cell = failed_cell(entry, plan, error, run)
        except Exception as error:
            cell = Cell(
                entry.name,
                plan,
                WRONG,
                f"{type(error).__name__}: {first_line(error)}",
                trace=str(error),
            )
        cell.seconds = time.monotonic() - started_s
        return cell

    def compared(self, entry: Entry, plan: str, run: Path, cut: Cut = WHOLE) -> Cell:
        if (run / REFUSAL).exists():
            text = (run / REFUSAL).read_text()
            return Cell(entry.name, plan, REFUSED, first_line(text), trace=text)
        reference = self.references[entry.name, cut]
        trained = read_run(run)
        if reference.outcome is None:
            return Cell(
                entry.name,
                plan,
                WRONG,
                f"trains, and one device fails: {reference.failure}",
                math.inf,
            )
        off, reason = distance(reference.outcome, trained, tolerance(entry))
        if reason:
            shutil.copytree(run, self.folder / "differing" / plan / entry.name, dirs_exist_ok=True)
        return Cell(
            entry.name, plan, WRONG if reason else EXACT, reason, off, steps=len(trained.losses)
        )

    def _settled(self, entry: Entry, plan: str, cell: Cell) -> Cell:
        """A cell that is not exact, tried again as a user would train it, and against one device that cuts the batch
        alike."""
        if cell.verdict != WRONG or cell.off is None:
            return cell
        resolved = _resolved(entry.make(), plan)
        cut = Cut(resolved.shares, resolved.plan.num_microbatches)
        run = self.folder / "differing" / plan / entry.name
        if cut != WHOLE and self._equals_cut(entry, plan, cut, run):
            return replace(
                cell,
                verdict=COUPLED,
                reason=f"as one device that cuts alike; off by {cell.off:.1e}",
            )
        return self._alone(entry, plan)

    def _equals_cut(self, entry: Entry, plan: str, cut: Cut, run: Path) -> bool:
        self.learn([(entry, cut)])
        reference = self.references[entry.name, cut].outcome
        return reference is not None and not distance(reference, read_run(run), tolerance(entry))[1]


def preload(jobs: Sequence[Entry]) -> None:
    """Import here, once, what ranks would import in each of their processes."""
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.export

    from paceline.strategies.compose import load

    for plan in PLANS:
        load(Plan.parse(plan))
    torch.export.export(
        torch.nn.Linear(2, 2), (torch.ones(3, 2),)
    )  # its first call imports more than the module does
    for entry in jobs:
        if entry.needs is not None:
            entry.make().model()


def _resolved(job: paceline.Job, plan: str) -> Resolved:
    parsed = Plan.parse(plan)
    return resolve(job, parsed, devices=f"cpu:0-{parsed.world_size - 1}")


def _all_ranks_refuse(context: Any, number: int) -> bool:
    """Whether every rank refuses the job, so that the next one can go on in these processes."""
    if context.store is None:
        return True
    keys = [f"refused/{number}/{rank}" for rank in range(context.world_size)]
    context.store.set(keys[context.rank], "")
    deadline_s = time.monotonic() + REFUSAL_S
    while not context.store.check(keys):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def _plain_figures(entry: Entry, cut: Cut, path: Path, context: Any) -> dict[str, Any]:
    context.beat("forward")
    try:
        outcome = (
            run_by_hand(entry.make(), entry.by_hand)
            if entry.by_hand is not None
            else run_plainly(entry.make(), cut, random_layers=entry.random_layers)
        )
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {first_line(error)}"}
    save_file(
        {name: _real(tensor).contiguous().clone() for name, tensor in outcome.state.items()}, path
    )
    return {"failure": "", "losses": outcome.losses, "validation_loss": outcome.validation_loss}


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _train_on_rank(context: Any, entry: Entry, resolved: Resolved, run: Path) -> None:
    job = entry.make()
    run.mkdir(exist_ok=True)
    with WithoutRandomness() if entry.random_layers else nullcontext() as random:
        if isinstance(random, WithoutRandomness):
            job = replace(job, model=random.building(job.model))
        summary = train_rank(context, job, resolved.plan, Settings(run, resolved.shares))
    if context.rank == 0:
        (run / SUMMARY).write_text(json.dumps({"validation_loss": summary["validation_loss"]}))


def train_quietly(entry: Entry, plan: str, run: Path, **options: Any) -> None:
    """`paceline.train`, its random layers off as in all runs of the corpus, and without its banner."""
    job = entry.make()
    with (
        WithoutRandomness() if entry.random_layers else nullcontext() as random,
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stderr(nothing),
    ):
        if isinstance(random, WithoutRandomness):
            job = replace(job, model=random.building(job.model))
        summary = paceline.train(
            job, plan, devices=f"cpu:0-{Plan.parse(plan).world_size - 1}", run=run, **options
        )
    (run / SUMMARY).write_text(json.dumps({"validation_loss": summary["validation_loss"]}))


def read_run(run: Path) -> Outcome:
    """What a run has left in its folder."""
    losses = [line["loss"] for line in _lines(run) if "loss" in line]
    return Outcome(
        {name: _real(tensor) for name, tensor in load_file(run / MODEL).items()},
        losses,
        json.loads((run / SUMMARY).read_text())["validation_loss"],
    )


def _lines(run: Path) -> list[dict[str, Any]]:
    path = run / METRICS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def failed_cell(entry: Entry, plan: str, error: PacelineError, run: Path) -> Cell:
    """The cell of a run that ended with an error: refused if it is a refusal and no update was made."""
    failure = getattr(error, "failure", None)
    kind = failure.kind if failure is not None else type(error).__name__
    message = failure.message if failure is not None else str(error)
    steps = sum("loss" in line for line in _lines(run))
    is_refusal = (kind in REFUSALS or isinstance(error, UsageError)) and not steps
    reason = first_line(message) if is_refusal else f"{kind}: {first_line(message)}"
    if not is_refusal and failure is not None:
        reason += f" [step {failure.step}, {failure.phase}]"
    return Cell(
        entry.name, plan, REFUSED if is_refusal else WRONG, reason, steps=steps, trace=str(error)
    )


def first_line(text: object) -> str:
    """With paths from the project's folder on."""
    return (str(text).splitlines() or [""])[0].replace(f"{_ROOT}/", "")


def tolerance(entry: Entry) -> float:
    """How far results may be from one device's, relative to the largest number of a tensor."""
    return entry.tolerance if entry.tolerance is not None else TOLERANCES[entry.make().precision]


def distance(plain: Outcome, trained: Outcome, allowed: float) -> tuple[float, str]:
    """How far a run is from one device at most, and what is too far, in words; "" if nothing is."""
    wrong: list[tuple[float, str]] = []
    greatest = 0.0
    if len(plain.losses) != len(trained.losses):
        return math.inf, f"{len(trained.losses)} steps instead of {len(plain.losses)}"
    pairs = {
        f"loss of step {step + 1}": (torch.tensor(mine), torch.tensor(other))
        for step, (mine, other) in enumerate(zip(plain.losses, trained.losses, strict=True))
    }
    if plain.validation_loss is not None:
        other = trained.validation_loss
        pairs["validation loss"] = (
            torch.tensor(plain.validation_loss),
            torch.tensor(math.nan if other is None else other),
        )
    for name, tensor in plain.state.items():
        if name not in trained.state:
            return math.inf, f"'{name}' is not in the exported model"
        pairs[f"'{name}'"] = (tensor, trained.state[name])
    for name, (mine, other) in pairs.items():
        off = _off(mine, other)
        limit = allowed * max(1.0, float(_wide(mine).abs().max()) if mine.numel() else 0.0)
        greatest = max(greatest, off)
        if not off <= limit:
            wrong.append((off, name))
    if not wrong:
        return greatest, ""
    off, name = max(wrong, key=lambda pair: -1.0 if math.isnan(pair[0]) else pair[0])
    return greatest, f"{name} is off by {off:.2g}" + (
        f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    )


def _off(mine: torch.Tensor, other: torch.Tensor) -> float:
    if mine.shape != other.shape:
        return math.inf
    if not mine.numel():
        return 0.0
    return float((_wide(mine) - _wide(other)).abs().max())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, of bools too, in double precision."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
