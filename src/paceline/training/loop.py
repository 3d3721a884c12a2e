"""A rank's training run: build, restore, step, evaluate, save, sum up."""

from __future__ import annotations

import json
import math
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import Subset

from paceline.base.errors import CallbackError, CheckpointError, JobError, Preempted
from paceline.base.files import write_json, write_text
from paceline.checkpoint.prune import later_saves, prune
from paceline.checkpoint.write import Writer, without_snapshots
from paceline.cluster.devices import Device
from paceline.job import Job
from paceline.job.order import Order, Window
from paceline.launch.process.context import RankContext
from paceline.launch.process.malloc import HeapTrimmer
from paceline.launch.process.memory_use import PeakMemory
from paceline.runs.documents import metrics_kind, read_lines
from paceline.runs.folder import CHECKPOINTS, JOURNAL, SPLIT
from paceline.runs.journal import Journal
from paceline.strategies.compose import end_evaluation, reported
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.training import state, trace
from paceline.training.control import Controlling, RunControl
from paceline.training.cores import CoreWait
from paceline.training.display import Display, Progress
from paceline.training.evaluate import evaluate, evaluate_step, refuse_before_training
from paceline.training.feed import DataShard, MicroBatch, evaluated_part, is_stream, training_feed
from paceline.training.optimizers.schedule import check_monitored, step_by_metrics
from paceline.training.parts import drift, peer_checkpoint
from paceline.training.parts.memory_checkpoint import Copier, open_newest
from paceline.training.parts.spikes import Spike, SpikeAction, Spikes
from paceline.training.prefetch import Fed, Prefetch
from paceline.training.restore import choose_checkpoint, mismatch, restore
from paceline.training.shares import refuse_single_samples
from paceline.training.stepper import Stepper, StepResult

if TYPE_CHECKING:
    from paceline.checkpoint.read import Checkpoint
    from paceline.launch.hosts.host_copies import HostCopies
    from paceline.launch.process.faults import Fault

WARM_UP_STEPS = 10  # of a launch, left out of its speed
REMEMBERED_STEPS = 1000  # whose times are kept
_NEVER = 2**62  # steps from copy to copy


class Observer(Protocol):
    """Sees what a rank computes. Called on every rank at the same points, so it may enter collectives."""

    def initial(self, stepper: state.StateOwner) -> None:
        """The launch's first forward is next; workers of servers, which have no weights yet, don't tell of it."""

    def samples(self, step: int, batches: list[MicroBatch]) -> None:
        """The micro-batches this rank is about to use, on the CPU."""

    def gradients(self, step: int, stepper: state.StateOwner) -> None:
        """Gradients are complete and not yet clipped."""

    def weights(self, step: int, stepper: state.StateOwner, loss: float) -> bool | None:
        """The update is done. Returns whether the run ends here, alike on every rank."""


@dataclass(frozen=True)
class Settings:
    """What a launch is told besides job and plan.

    shares: weight of each replica in the global batch.
    devices: of each rank; where a model is cut depends on their memory and speed.
    save_on_stop: whether a run that is asked to stop saves where it is.
    keep_checkpoints: how many of the newest ones stay, beside the best; all by default.
    keep: asked on every rank after the last evaluation, and answered alike: whether to save what was trained.
    trace_steps: how many steps to trace, after the first of this launch.
    observer: looks on without changing anything; `verify` compares through it.
    on_evaluation: told of each evaluation on rank 0: the step, and "validation_loss" and every metric.
    controller: what callbacks hear of the run, and what they ask of it, goes through this.
    faults: that strike ranks; see `launch.process.faults`.
    on_spike: what happens in a step whose loss is far above those before; see `training/parts/spikes.py`.
    is_trial: whether steps are timed or compared, and what follows from evaluations is left out.
    """

    run_dir: Path | None
    shares: tuple[int, ...]
    save_every: int | None = None
    keep_checkpoints: int | None = None
    resume: bool = False
    save_on_stop: bool = True
    keep: Callable[[], bool] | None = None
    loader_workers: int = 0
    devices: tuple[Device, ...] = ()
    trace_steps: int = 0
    observer: Observer | None = None
    on_evaluation: Callable[[int, Mapping[str, float]], None] | None = None
    controller: Controlling | None = None
    faults: tuple[Fault, ...] = ()
    on_spike: SpikeAction | None = None
    is_trial: bool = False


def part_of(plan: Plan, mesh: Mesh, shares: tuple[int, ...]) -> DataShard:
    """This rank's part of every window."""
    return DataShard(shares, mesh.replica, plan.num_microbatches)


@dataclass
class Speed:
    """Time spent in steps after the warm-up, without evaluation and saving.

    latest_s: of the latest steps, each.
    """

    steps: int = 0
    warm_steps: int = 0
    warm_samples: int = 0
    warm_s: float = 0.0
    all_s: float = 0.0
    all_samples: int = 0
    input_s: float = 0.0
    latest_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))

    def add(self, samples: int, step_s: float, *, input_s: float = 0.0) -> None:
        """input_s: of step_s, until the samples were there."""
        self.steps += 1
        self.input_s += input_s
        self.latest_s.append(step_s)
        self.all_s, self.all_samples = self.all_s + step_s, self.all_samples + samples
        if self.steps > WARM_UP_STEPS:
            self.warm_steps += 1
            self.warm_s, self.warm_samples = self.warm_s + step_s, self.warm_samples + samples

    @property
    def samples_per_s(self) -> float:
        samples, spent_s = (
            (self.warm_samples, self.warm_s) if self.warm_steps else (self.all_samples, self.all_s)
        )
        return samples / spent_s if spent_s else 0.0

    @property
    def step_s(self) -> float:
        return self.warm_s / self.warm_steps if self.warm_steps else self.all_s / max(self.steps, 1)

    @property
    def later_step_s(self) -> float:
        """The mean of the later half of the latest steps."""
        later = list(self.latest_s)[len(self.latest_s) // 2 :]
        return statistics.fmean(later) if later else 0.0


@dataclass
class _Run:
    """One rank's run while it goes on.

    loss: of the last step after which ranks met and that has a finite one. unmet: what is to be recorded of the steps
        since the ranks met.
    scheduled_step: after which an evaluation stepped the schedule last.
    due: what is to be done when replicas are where a run may be saved. stop: some rank was asked to.
    is_copied: whether it goes on from a copy in memory.
    ended: why a callback or the observer ended the run, if one did. epoch: of the last step. ended_epochs: that
        callbacks are to hear of. evaluated_step: of the last evaluation.
    passed_over: saves of checkpoints that it could not go on from.
    compared_step: after which replicas were last compared. comparison: which has no result yet.
    """

    context: RankContext
    job: Job
    plan: Plan
    settings: Settings
    mesh: Mesh
    stepper: Stepper
    memory: PeakMemory
    heap: HeapTrimmer
    display: Display
    writer: Writer | None
    copier: Copier | None
    metrics: Path | None
    journal: Journal
    scheduled_step: int = -1
    step: int = 0
    samples: int = 0
    loss: float = float("nan")
    evaluated: dict[str, float] = field(default_factory=dict)
    unmet: list[dict[str, Any]] = field(default_factory=list)
    due: set[str] = field(default_factory=set)
    stop: bool = False
    control: RunControl | None = None
    restored_callbacks: list[dict[str, Any]] | None = None
    is_copied: bool = False
    ended: str | None = None
    epoch: int = 0
    ended_epochs: list[int] = field(default_factory=list)
    evaluated_step: int | None = None
    compared_step: int | None = None
    comparison: drift.ReplicaComparison | None = None
    saved_step: int | None = None
    passed_over: frozenset[str] = frozenset()
    num_exports: int = 0
    blocked_s: float = 0.0
    speed: Speed = field(default_factory=Speed)
    core_wait: CoreWait = field(default_factory=CoreWait)

    def figures(self) -> dict[str, Any]:
        """What a run that goes on from a copy knows beside its state."""
        return {
            "loss": self.loss,
            "evaluated": self.evaluated,
            "evaluated_step": self.evaluated_step,
            "scheduled_step": self.scheduled_step,
            "saved_step": self.saved_step,
            "epoch": self.epoch,
            "due": sorted(self.due),
            "ended_epochs": self.ended_epochs,
        }

    def take_figures(self, figures: Mapping[str, Any]) -> None:
        """Know what a run knew at its last copy. A save that its ranks had begun and not ended is made again."""
        (
            self.loss,
            self.evaluated,
            self.evaluated_step,
            self.scheduled_step,
            self.epoch,
            self.ended_epochs,
        ) = (
            figures[name]
            for name in (
                "loss",
                "evaluated",
                "evaluated_step",
                "scheduled_step",
                "epoch",
                "ended_epochs",
            )
        )
        self.due |= set(figures["due"])
        saved_step, run_dir = figures["saved_step"], self.settings.run_dir
        if saved_step is not None and run_dir is not None:
            if (run_dir / CHECKPOINTS / f"step-{saved_step}").exists():
                self.saved_step = saved_step
            else:
                self.due.add("save")

    def beat(self, phase: str) -> None:
        """A sign of life in a phase of a step."""
        self.context.beat(phase)
        if self.stepper.trace is not None:
            self.stepper.trace.phase(phase)

    def record(self, **figures: Any) -> None:
        """A line of metrics.jsonl, on rank 0."""
        if self.metrics is not None:
            append_metrics(self.metrics, {"step": self.step, "time": time.time(), **figures})


def train_rank(context: RankContext, job: Job, plan: Plan, settings: Settings) -> dict[str, Any]:
    """Train on this rank and return the summary, equal on every rank but for the memory.

    Raises:
        Preempted: the run was asked to stop; it saved a checkpoint.
        TrainingError, JobError, CheckpointError: see the message.
    """
    started_s = time.monotonic()
    run = _build(context, job, plan, settings)
    try:
        _restore(run)
        run.journal.begin(job, plan=str(plan), world_size=context.world_size, after=run.step)
        _begin_control(run)
        if settings.trace_steps:  # the first step is not like the others: models are captured in it
            stepper = run.stepper
            stepper.trace = trace.TraceRecorder(
                context.rank, range(run.step + 1, run.step + 1 + settings.trace_steps)
            )
        with context.stoppable():
            if run.is_copied:
                _do_what_is_due(run)  # what the ranks before these had not ended
            if run.ended is None and _steps(run):
                _stop(run)  # a request may reach this rank later than the others that told it
            return _finish(
                run, started_s
            )  # a request that comes now must not cost the last checkpoint
    finally:
        run.display.close()
        run.journal.close()


def _build(context: RankContext, job: Job, plan: Plan, settings: Settings) -> _Run:
    context.beat("build")
    memory = PeakMemory(context.device)
    mesh = Mesh.of(plan, context.rank)
    mesh.connect()
    refuse_single_samples(job, plan, settings.shares, context.device)
    stepper = Stepper(
        job, plan, mesh, context.device, devices=settings.devices, shares=settings.shares
    )
    stepper.note_verb = context.note_verb
    if settings.on_spike is not None:
        stepper.watch(Spikes(settings.on_spike))
    if not settings.is_trial:
        measured = (
            None
            if job.validation is None or is_stream(job.validation)
            else _measured(context, job, plan, settings, mesh, stepper)
        )
        check_monitored(stepper.schedule, job, measured)
    drift.check_replicas(drift.replicated(stepper), mesh=mesh, step=0)
    run_dir = settings.run_dir
    writer = metrics = None
    journal = Journal(run_dir / JOURNAL if run_dir is not None and context.rank == 0 else None)
    if run_dir is not None:
        writer = Writer(
            run_dir,
            rank=context.rank,
            world_size=context.world_size,
            attempt=context.attempt,
            num_ranks=context.local_world_size,
        )
        metrics = run_dir / "metrics.jsonl" if context.rank == 0 else None
        state.refuse_unsaveable(stepper)  # now, not after an hour
    run = _Run(
        context,
        job,
        plan,
        settings,
        mesh,
        stepper,
        memory,
        HeapTrimmer(context.device.type),
        Display(shown=context.rank == 0 and settings.observer is None),
        writer,
        _copier(context, stepper),
        metrics,
        journal,
    )
    _tell(run)
    stepper.before_update = partial(_before_update, run)
    return run


def _copier(context: RankContext, stepper: Stepper) -> Copier | None:
    """None where nobody would read copies."""
    if context.copies is None:
        return None
    if context.host_copies is None:
        return Copier(context, context.copies, context.local_world_size)
    return Copier(
        context,
        context.copies,
        context.local_world_size,
        peer_checkpoint.origin_of(stepper, context),
        context.host_copies if peer_checkpoint.needs_neighbour(stepper, context) else None,
    )


def _measured(
    context: RankContext, job: Job, plan: Plan, settings: Settings, mesh: Mesh, stepper: Stepper
) -> list[str]:
    """Names of the job's metrics, or of what its `validate` gives. A first batch is evaluated, so that what is wrong
    with them is known before the first step. Collective."""
    options: Any = {
        "mesh": mesh,
        "device": context.device,
        "part": part_of(plan, mesh, settings.shares),
    }
    names: Iterable[str] = job.metrics
    if job.models:
        first = Subset(job.validation, range(min(len(job.validation), job.batch)))
        names = evaluate_step(stepper.model, stepper.parts, job, first, **options)
    elif job.metrics:
        refuse_before_training(stepper.model, stepper.layout, job, **options)
    end_evaluation(
        stepper.synchronisers
    )  # what was gathered may be of weights that a checkpoint replaces
    return list(names)


def _tell(run: _Run) -> None:
    """How the model was laid out, where there is something to say."""
    report = run.stepper.layout.report
    if run.writer is not None and (unsaved := run.stepper.job_state.unsaved):
        run.display.say(
            f"checkpoints don't keep what training changes of {', '.join(unsaved[:5])}: iterators, open "
            "files and large arrays begin anew in a resumed run"
        )
    for line in report.lines:
        run.display.say(line)
    if report.document and run.settings.run_dir is not None and run.context.rank == 0:
        write_json(run.settings.run_dir / SPLIT, report.document)


def _restore(run: _Run) -> None:
    if not run.settings.resume or run.settings.run_dir is None:
        _begin_copies(run, None)
        return
    run.context.beat("restore")
    accept = partial(mismatch, run.stepper)
    copied = (
        peer_checkpoint.open_newest(run.context, run.settings.run_dir, accept)
        if run.context.host_copies is not None
        else open_newest(run.context, run.settings.run_dir, num_ranks=run.context.world_size)
    )
    checkpoint = copied or choose_checkpoint(run.context, run.settings.run_dir, accept=accept)
    if checkpoint is None:
        run.display.say("no checkpoint to resume from: starting at step 0")
    else:
        run.restored_callbacks = checkpoint.document.get("callbacks")
        notes = restore(run.stepper, checkpoint)
        run.step, run.samples = checkpoint.document["step"], checkpoint.document["samples"]
        if run.stepper.spikes is not None and "spikes" in checkpoint.document:
            run.stepper.spikes.restore(checkpoint.document["spikes"])
        run.display.say("; ".join([f"resumed from {checkpoint.path.name}", *notes]))
    if copied is not None:
        run.is_copied = True
        run.take_figures(copied.document["figures"])
        if isinstance(copied, peer_checkpoint.HostsCopy):
            copied.close()
    _begin_copies(run, copied)
    if run.metrics is not None:
        run.passed_over = later_saves(run.settings.run_dir, after=run.step)
        cut_metrics(run.metrics, run.step)
        run.loss = recorded_loss(run.metrics)  # there may be no step left


def _begin_copies(run: _Run, copied: Checkpoint | None) -> None:
    """The run goes on from here. copied: from what in memory, if it is that."""
    copier, context = run.copier, run.context
    if copier is not None:
        copier.begin(run.step, is_copied=copied is not None)
    if context.host_copies is not None:
        peer_checkpoint.begin(run.stepper, context, run.step, copied)


def append_metrics(path: Path, figures: Mapping[str, Any]) -> None:
    """A line of metrics.jsonl.

    Raises:
        CheckpointError: the file can't be written, or its folder is not the run's any more.
    """
    if not path.with_name(JOURNAL).exists():  # which is there before the first line
        raise CheckpointError(
            f"the run folder {path.parent} is gone: it was removed, renamed or unmounted meanwhile",
            hint="--run DIR --resume goes on from its last checkpoint, where it is now",
        )
    try:
        with open(path, "a") as file:
            file.write(json.dumps(figures) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"can't write {path}: {error.strerror}",
            hint="--resume goes on from the last checkpoint when there is space again",
        ) from error


def cut_metrics(path: Path, step: int) -> None:
    """Forget what the interrupted run recorded after the step that this one goes on from, and damaged lines."""
    if path.exists():
        kept = [row for row in read_lines(path, metrics_kind) if row["step"] <= step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def recorded_loss(path: Path) -> float:
    """The last finite loss that a run recorded of a step; NaN if there is none."""
    losses = [row["loss"] for row in read_lines(path, metrics_kind) if row.get("loss") is not None]
    return losses[-1] if losses else math.nan


# --- Callbacks ---------------------------------------------------------------------------------------------------


def _begin_control(run: _Run) -> None:
    """Let callbacks know that the first step is next."""
    if run.settings.controller is None:
        return
    run.control = RunControl(run.context, run.settings.controller, partial(_obey, run))
    _heed(
        run,
        run.control.ask(
            {
                "event": "start",
                "step": run.step,
                "callbacks": run.restored_callbacks,
                "keeps": run.is_copied,
            }
        ),
    )


def _obey(run: _Run, order: dict[str, Any]) -> dict[str, Any]:
    """What callbacks need while ranks wait: the weights as they are now, in a checkpoint without the optimizer."""
    assert order["do"] == "weights" and run.writer is not None and run.settings.run_dir is not None
    if run.saved_step == run.step:
        _end_save(run)
        return {
            "path": str(run.settings.run_dir / CHECKPOINTS / f"step-{run.step}"),
            "is_temporary": False,
        }
    _set_mode(run, trains=False)
    run.stepper.step_sync.drain()
    run.num_exports += 1
    folder = run.settings.run_dir / f".weights-{run.context.attempt}-{run.num_exports}"
    writer = Writer(
        folder,
        rank=run.context.rank,
        world_size=run.context.world_size,
        attempt=run.context.attempt,
    )
    writer.save(
        run.step,
        state.weights_of(state.pieces(run.stepper)),
        {"step": run.step, "ties": state.ties(run.stepper.model)},
        snapshot=False,
    )
    writer.wait()
    _greatest(run, 0)  # every rank has seen it complete before it is removed
    return {"path": str(folder / CHECKPOINTS / f"step-{run.step}"), "is_temporary": True}


def _event(run: _Run, hook: str, event: str, **values: Any) -> None:
    """Let callbacks hear of an event, if one has the hook, and do what they ask for."""
    if run.control is not None and run.control.has(hook):
        _heed(run, run.control.ask({"event": event, "step": run.step, **values}))


def _heed(run: _Run, answer: Mapping[str, Any]) -> None:
    """Note what callbacks ask for.

    Raises:
        CallbackError: one of them failed; the run is saved where it is.
    """
    if answer.get("failed"):
        saves = run.settings.run_dir is not None and run.settings.save_on_stop and run.step > 0
        if saves:  # or has begun to be saved, which is waited for then
            _save(run, last=True)
        raise CallbackError(
            answer["failed"] + ("; a checkpoint is saved" if saves else ""),
            heard=run.context.rank != 0,
        )
    run.ended = run.ended if run.ended is not None else answer.get("stop")
    run.due |= {name for name in ("evaluate", "save") if answer.get(name)}


def _attend(run: _Run) -> bool:
    """Some rank was asked to stop, or callbacks want something. Returns whether the run is to be left as it is."""
    if run.control is None or _greatest(run, int(run.context.stop_signal is not None)):
        return True
    run.stop = False
    _heed(run, run.control.take())
    _do_what_is_due(run)
    return False


# --- Steps -------------------------------------------------------------------------------------------------------


def _steps(run: _Run) -> bool:
    """Take every step that is left, or until a callback ends the run. Returns whether the run was asked to stop."""
    job, context = run.job, run.context
    order = None if is_stream(job.data) else Order.of(job)
    recorder, stepper = run.stepper.trace, run.stepper
    feed = Prefetch(
        iter(_feed(run, order)),
        context.device,
        torch.float64 if job.precision == "float64" else None,
    )

    def stop() -> bool:
        return context.stop_signal is not None or (
            run.control is not None and run.control.wants_attention
        )

    def on_launched() -> None:
        if feed.copies is not None:
            run.beat("input")
            feed.prepare_next()
            run.beat("reduce")

    while True:
        context.step = run.step + 1
        if recorder is not None:
            recorder.begin(run.step)
        run.beat("input")
        began_s = time.perf_counter()
        fed = feed.next()
        if fed is None:
            break
        input_s = time.perf_counter() - began_s
        observer = run.settings.observer
        if observer is not None:
            if not stepper.has_begun:
                observer.initial(stepper)
            observer.samples(run.step, fed.batches)
        scale = stepper.scaling.scale if stepper.scaling is not None else None
        _set_mode(run, trains=True)
        with _with_evidence(run, fed):
            result = stepper.step(
                fed.window,
                fed.placed,
                step=run.step,
                stop=stop,
                beat=run.beat,
                on_launched=on_launched,
                observe=partial(observer.gradients, run.step) if observer else None,
            )
            _judge(run, result)
        step_s = time.perf_counter() - began_s
        if recorder is not None:
            recorder.phase("end")
        _after_step(run, fed.window, result, step_s, input_s, scale)
        if result.spike:
            _pass_over(run, fed, result)
        if order is not None and order.ends_epoch(run.step):
            run.due |= {"evaluate", "epoch"}
            run.ended_epochs.append(fed.window.epoch)
        if result.is_settled and run.step != job.total_steps:
            _do_what_is_due(run)
            if run.stop and _attend(run):
                return True
            if run.ended is not None:
                break
        if result.is_settled:
            _copy(run)
    return False


def _set_mode(run: _Run, *, trains: bool) -> None:
    """Let the weights be in place that are trained, or those that are evaluated, saved and given to
    users. Collective."""
    if run.stepper.has_modes and run.stepper.trains is not trains:
        run.beat("optimizer")
        run.stepper.set_mode(trains=trains)


def _feed(run: _Run, order: Order | None) -> Iterator[tuple[Window, list[MicroBatch]]]:
    part = part_of(run.plan, run.mesh, run.settings.shares)
    total = run.job.total_steps if run.job.total_steps is not None else sys.maxsize
    return training_feed(
        run.job,
        order=order,
        part=part,
        loader_workers=run.settings.loader_workers,
        steps=range(run.step, total),
    )


def _after_step(
    run: _Run,
    window: Window,
    result: StepResult,
    step_s: float,
    input_s: float,
    scale: float | None,
) -> None:
    """scale: that the step's loss was multiplied by; None without loss scaling."""
    run.step, run.samples = run.step + 1, run.samples + window.count
    run.speed.add(window.count, step_s, input_s=input_s)
    more: dict[str, Any] = (
        {} if result.gradient_norm is None else {"gradient_norm": result.gradient_norm}
    )
    if scale is not None:
        more |= {"loss_scale": scale}
    if result.is_skipped:
        more |= {"skipped": True, **({"spike": result.spike} if result.spike else {})}
    run.unmet.append(
        {
            "step": run.step,
            "epoch": window.epoch,
            "samples": run.samples,
            "lr": learning_rate(run.stepper.optimizer),
            "step_s": step_s,
            **more,
        }
    )
    run.epoch = window.epoch
    run.journal.note(run.step, window, skipped=result.is_skipped)
    _learn(run, result)
    if run.control is not None:
        run.control.tell()
    if run.settings.observer is not None and run.settings.observer.weights(
        run.step - 1, run.stepper, run.loss
    ):
        run.ended = "its observer said so"
    if run.step % drift.EVERY_STEPS == 0 or run.speed.steps == 1:
        run.due.add("compare")
    if run.writer is not None:
        run.writer.poll()
    run.heap.poll()
    if run.settings.save_every and run.step % run.settings.save_every == 0:
        run.due.add("save")
    if run.settings.save_every and run.speed.steps == 1:
        run.due.add("prepare")
    is_last = run.step == run.job.total_steps and run.display.is_plain
    if result.losses and (run.display.due() or is_last):
        run.display.update(
            Progress(
                run.step,
                run.job.total_steps,
                window.epoch,
                run.loss,
                run.speed.samples_per_s,
                run.speed.step_s,
                run.memory.bytes(),
                predicted_step_s(run.settings),
            )
        )


@contextmanager
def _with_evidence(run: _Run, fed: Fed) -> Iterator[None]:
    """Keep the samples of a step whose spike ends the run, and say where they are and which module it began in."""
    try:
        yield
    except Spike as spike:
        from paceline.training.parts.spike_dump import first_bad_module, keep

        module = first_bad_module(run.stepper, fed.window, fed.placed, step=run.step)
        evidence_path = run.settings.run_dir and keep(
            run.settings.run_dir,
            run.stepper,
            fed.window,
            fed.batches,
            step=run.step + 1,
            why=str(spike.args[0]),
            module=module,
        )
        evidence = [
            *([f"the first module that returns such numbers is '{module}'"] if module else []),
            *([f"its samples are in {evidence_path}"] if evidence_path else []),
        ]
        spike.args = ("; ".join([spike.args[0], *evidence]),)
        raise


def _judge(run: _Run, result: StepResult) -> None:
    """
    Raises:
        Spike: the step is one, and the run ends here.
    """
    if result.spike:
        assert run.stepper.spikes is not None
        run.stepper.spikes.refuse_more(result.spike, run.step + 1)


def _pass_over(run: _Run, fed: Fed, result: StepResult) -> None:
    """Nothing was updated in this step, which is a spike: keep its samples, and go back if that was asked for."""
    if run.settings.run_dir is not None:
        from paceline.training.parts.spike_dump import keep

        keep(
            run.settings.run_dir,
            run.stepper,
            fed.window,
            fed.batches,
            step=run.step,
            why=result.spike,
            module=None,
        )
    back = _rewind(run) if run.settings.on_spike == "rewind" else ""
    run.display.say(f"step {run.step} is a spike and changes no weight: {result.spike}{back}")


def _rewind(run: _Run) -> str:
    """Take the state of the newest checkpoint, and leave out the samples of all steps since. Collective.

    Returns:
        What was done, in words.
    """
    from paceline.checkpoint.read import newest_saved_step, open_checkpoint

    assert (
        run.writer is not None
        and run.settings.run_dir is not None
        and run.stepper.spikes is not None
    )
    _end_save(run)
    if run.copier is not None:
        run.copier.wait()
    step = _greatest(run, newest_saved_step(run.settings.run_dir) if run.context.rank == 0 else -1)
    if step < 0:
        return "; there is no checkpoint yet to go back to"
    spikes = run.stepper.spikes.to_dict()
    run.stepper.step_sync.drain()
    end_evaluation(
        run.stepper.synchronisers
    )  # what was gathered is of the weights that are replaced
    checkpoint = open_checkpoint(
        run.settings.run_dir / CHECKPOINTS / f"step-{step}", checksums=False
    )
    restore(run.stepper, checkpoint)
    run.stepper.edits.updated()
    run.journal.go_back(run.job, plan=str(run.plan), world_size=run.context.world_size, after=step)
    run.stepper.spikes.restore(spikes)
    run.record(rewound_to=step)
    run.compared_step = None
    return f"; the weights are those of step {step} again, and the samples of the steps since are left out"


def learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """Of the first group; None if it has none."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def _learn(run: _Run, result: StepResult) -> None:
    """Record the steps whose losses are known now."""
    run.stop = run.stop or bool(result.stop)
    if result.losses:
        for figures, loss in zip(run.unmet, result.losses, strict=True):
            run.record(
                **figures, loss=loss if math.isfinite(loss) else None
            )  # of a step that was skipped
        run.loss = next((loss for loss in reversed(result.losses) if math.isfinite(loss)), run.loss)
        run.unmet = []
        run.journal.settle(result.digest)


def _do_what_is_due(run: _Run) -> None:
    """Compare, evaluate and save, now that replicas are where they may be, and what callbacks ask for meanwhile.

    Callbacks hear of the evaluation and the epoch before the checkpoint is saved that has their state.
    """
    while run.due:
        due, run.due = run.due, set()
        if "compare" in due:
            _compare(run)
        if "prepare" in due and run.writer is not None:
            _prepare_saves(run, run.writer)
        if "evaluate" in due:
            _evaluate(run)
        if "epoch" in due:
            epochs, run.ended_epochs = run.ended_epochs, []
            for epoch in epochs:
                _event(run, "on_epoch", "epoch", epoch=epoch, samples=run.samples)
        if "save" in due and run.due & {"evaluate"}:
            run.due.add("save")  # after what is to be evaluated first
        elif "save" in due | run.due:
            run.due.discard("save")
            _save(run)


def _compare(run: _Run) -> None:
    """Compare what replicas hold, if that has not been done after this step, or begin to; the next update waits for the
    result. Collective."""
    if run.compared_step == run.step:
        return
    stepper = run.stepper
    _end_comparison(run)
    stepper.step_sync.drain()
    run.comparison = drift.ReplicaComparison(
        drift.replicated(stepper),
        mesh=run.mesh,
        step=run.step,
        more=partial(state.alike_along, stepper),
        stays=stepper.is_for_updates,
    )
    run.compared_step = run.step
    if not run.comparison.is_beside:
        _end_comparison(run)


def _end_comparison(run: _Run) -> None:
    """Collective."""
    if run.comparison is not None:
        comparison, run.comparison = run.comparison, None
        comparison.finish(edited=run.stepper.edits.names, outside=run.stepper.edits.outside)
        if run.settings.run_dir is not None:
            run.journal.note_weights(comparison.step, comparison.weights())


def _end_save(run: _Run) -> None:
    """Return when what is being saved is committed. Collective."""
    assert run.writer is not None
    _end_comparison(run)
    run.writer.wait()


def _document(run: _Run) -> dict[str, Any]:
    """What of the run's state is not a tensor."""
    spikes = run.stepper.spikes
    return state.document(run.stepper, step=run.step, samples=run.samples) | (
        {} if spikes is None else {"spikes": spikes.to_dict()}
    )


def _copy(run: _Run) -> None:
    """Copy the state where the next ranks find it if one of these is lost. Collective now and then."""
    copier, context = run.copier, run.context
    if copier is None or run.step < copier.next_step:
        return
    context.beat("copy")
    began_s = time.perf_counter()
    run.stepper.step_sync.drain()
    sends = (
        copier.neighbour is not None
        and _is_sent(run, copier, copier.neighbour)
        and run.step >= copier.next_send
    )
    if run.copier is None:
        return
    fingerprints = drift.fingerprints(run.stepper, partial(state.alike_along, run.stepper))
    pieces = list(
        chain(
            state.pieces(
                run.stepper,
                host_ranks=context.local_world_size if context.host_copies is not None else None,
            ),
            fingerprints,
        )
    )
    if copier.num_copies == 0 and _greatest(
        run, int(not copier.fits(pieces))
    ):  # too late once the kernel ends a rank
        _end_copies(run)
        return
    copier.copy(
        run.step,
        pieces,
        _copy_document(run),
        is_for_updates=run.stepper.is_for_updates,
        began_s=began_s,
    )
    if (
        copier.num_copies == 2  # all ranks have the one before
        and context.host_copies is not None
        and copier.neighbour is None
        and context.slot == 0
    ):
        context.host_copies.give_back_kept()
    if (
        copier.num_copies & (copier.num_copies - 1) == 0
    ):  # after 1, 2, 4, 8, ... copies, on all ranks alike
        if copier.num_copies <= 2:  # the times of later ones are those of copies before them
            copier.wait()
        copier.every = _greatest(
            run, _affordable_every(run, copier) if copier.fits(pieces) else _NEVER
        )
        if copier.neighbour is not None:
            copier.send_every = _greatest(
                run, copier.affordable_send_every(statistics.median(run.speed.latest_s))
            )
        if copier.every == _NEVER:
            _end_copies(run)
    if sends and run.copier is not None:
        copier.send(run.step)


def _affordable_every(run: _Run, copier: Copier) -> int:
    """Steps from copy to copy of this rank, for their share of the time."""
    return copier.affordable_every(statistics.median(run.speed.latest_s))


def _is_sent(run: _Run, copier: Copier, neighbour: HostCopies) -> bool:
    """Whether each host has what it was to take over of the host before it. Collective."""
    is_missing = copier.sending >= 0 and neighbour.taken_step != copier.sending
    missing = _greatest(run, 2 * int(neighbour.has_failed) + int(is_missing))
    if missing > 1:
        _end_copies(run)
    elif not missing:
        copier.note_sent()
    return not missing


def _end_copies(run: _Run) -> None:
    """Make no more copies, and give back the memory of those that no other host takes over. All ranks do."""
    assert run.copier is not None
    copier, run.copier = run.copier, None
    if copier.neighbour is None:
        copier.copies.give_back(run.context.slot)
    run.display.say(
        "a host's memory has no room for copies of the state: if a rank is lost, the run goes on from the "
        "last checkpoint"
    )


def _copy_document(run: _Run) -> dict[str, Any] | None:
    """What of the run's state is not a tensor, for ranks that go on from memory. Rank 0 alone has it; where there are
    several hosts, the first rank of each, and callbacks' state, as they end with rank 0."""
    context = run.context
    if context.host_copies is None:
        return _document(run) | {"figures": run.figures()} if context.rank == 0 else None
    answer: Mapping[str, Any] = {}
    if run.control is not None and run.control.has("state_dict"):
        answer = run.control.ask({"event": "state", "step": run.step})
        _heed(run, answer)
    data = bytearray(b" ")
    if context.rank == 0:
        document = _document(run) | {"figures": run.figures(), "callbacks": answer.get("callbacks")}
        data = bytearray(json.dumps(document).encode())
    if context.world_size > 1:
        sent = torch.frombuffer(data.ljust(_greatest(run, len(data))), dtype=torch.uint8).to(
            context.device
        )
        torch.distributed.broadcast(sent, 0)
        data = bytearray(sent.cpu().numpy())
    return json.loads(data) if context.slot == 0 else None


def _before_update(run: _Run) -> None:
    """What follows may write to what is being compared, or copied for a save, or from a GPU for a copy of the state.
    Collective."""
    _end_comparison(run)
    if run.writer is not None:
        began_s = time.monotonic()
        run.writer.before_update()
        run.blocked_s += time.monotonic() - began_s
    if run.copier is not None:
        run.copier.before_update()


def predicted_step_s(settings: Settings) -> float | None:
    """What was predicted of a step, once it is known."""
    path = settings.run_dir / "predicted.json" if settings.run_dir else None
    return json.loads(path.read_text())["step_s"] if path is not None and path.exists() else None


def _save(run: _Run, *, last: bool = False) -> None:
    """Write a checkpoint in the background; after the last step from the tensors themselves, and wait for it."""
    if run.writer is None:
        return
    run.context.beat("save")
    began_s = time.monotonic()
    _end_save(run)  # the save before is not lost if replicas differ now
    if run.saved_step == run.step:
        return
    _set_mode(run, trains=False)
    _compare(run)  # what is saved is what all replicas hold
    run.stepper.step_sync.drain()
    document = _document(run)
    document["compared"] = run.mesh.num_copies
    answer: Mapping[str, Any] = {}
    if run.control is not None and run.control.has("state_dict"):
        answer = run.control.ask({"event": "state", "step": run.step})
        document["callbacks"] = answer.get(
            "callbacks"
        )  # rank 0 alone knows, and its document counts
    if not last and run.writer.takes_snapshots is None:  # a callback asked for a save, or a signal
        _prepare_saves(run, run.writer)
    run.saved_step = run.step
    run.writer.save(
        run.step,
        state.pieces(run.stepper),
        document,
        snapshot=not last,
        is_for_updates=run.stepper.is_for_updates,
        held_alike=run.comparison.held_alike if run.comparison is not None else dict,
        before_commit=run.journal.sync,
    )
    if last:
        _end_save(run)
    _prune(run)
    blocked_s = time.monotonic() - began_s
    run.blocked_s += blocked_s
    run.record(saved=True, blocked_s=blocked_s)
    if run.control is not None and run.control.has("on_save"):
        _end_save(run)
        _event(run, "on_save", "save", path=str(run.writer.folder / f"step-{run.step}"))
    _heed(run, answer)


def _prepare_saves(run: _Run, writer: Writer) -> None:
    """Take memory for copies of what saves write, if all ranks have it. Collective."""
    pieces = list(state.pieces(run.stepper))
    writer.takes_snapshots = not _greatest(run, not writer.has_memory_for(pieces))
    if writer.takes_snapshots:
        writer.prepare(pieces)
    else:
        run.display.say(without_snapshots(pieces))


def _prune(run: _Run) -> None:
    if run.settings.keep_checkpoints and run.settings.run_dir is not None and run.context.rank == 0:
        prune(
            run.settings.run_dir,
            newest=run.settings.keep_checkpoints,
            passed_over=run.passed_over,
        )


def _save_trained(run: _Run) -> None:
    """Write the last checkpoint, and the model by itself."""
    assert run.settings.run_dir is not None
    if run.saved_step != run.step:
        _save(run, last=True)
    _prune(run)  # of what was being saved then
    if run.context.rank == 0:
        state.export(run.stepper.model, run.settings.run_dir, step=run.step)
    if run.context.store is not None:  # a collective would give up after its own time limit
        key = f"exported/{run.context.num_trained}"
        if run.context.rank == 0:
            run.context.store.set(key, "")
        run.context.hear(key, "save")


def _evaluate(run: _Run) -> None:
    if run.job.validation is None or run.evaluated_step == run.step:
        return
    run.evaluated_step = run.step
    stepper, part = run.stepper, part_of(run.plan, run.mesh, run.settings.shares)
    _set_mode(run, trains=False)
    _before_update(run)  # replicas may have shared weights put in place of their own
    stepper.step_sync.drain()
    sample_share = evaluated_part(run.job.validation, batch=run.job.batch, part=part)
    with (
        stepper.step_sync.global_weights_in_place(),
        stepper.evaluating(sample_share, step=run.step),
    ):
        options: Any = {
            "mesh": run.mesh,
            "device": run.context.device,
            "part": part,
            "beat": run.context.beat,
        }
        figures, refused = (
            (
                evaluate_step(stepper.model, stepper.parts, run.job, run.job.validation, **options),
                None,
            )
            if run.job.models
            else evaluate(stepper.model, stepper.layout, run.job, run.job.validation, **options)
        )
    if _greatest(run, int(refused is not None)):  # what was trained is not lost with a metric
        _save(run, last=True)
        if refused is not None:
            raise refused
        _greatest(run, 0)  # which the rank that tells of it ends
    run.evaluated = {"validation_loss": figures.pop("loss"), **figures}
    if (
        stepper.schedule is not None
        and not run.settings.is_trial
        and (run.speed.steps or run.is_copied)
        and (
            run.scheduled_step != run.step
            and not is_stream(run.job.data)
            and Order.of(run.job).ends_epoch(run.step)
        )
    ):
        step_by_metrics(stepper.schedule, run.job, run.evaluated)
        run.scheduled_step = run.step
    run.record(validation_loss=run.evaluated["validation_loss"], metrics=figures)
    run.display.say(
        f"step {run.step}: " + ", ".join(f"{k} {v:.4f}" for k, v in run.evaluated.items())
    )
    if run.settings.on_evaluation is not None and run.context.rank == 0:
        run.settings.on_evaluation(run.step, run.evaluated)
    _event(
        run,
        "on_evaluation",
        "evaluation",
        epoch=run.epoch,
        validation_loss=run.evaluated["validation_loss"],
        metrics=figures,
    )


def _stop(run: _Run) -> None:
    """Save where the run is and leave, because it was asked to. Collective."""
    context = run.context
    number, rank = divmod(
        _greatest(run, (context.stop_signal or 0) * context.world_size + context.rank),
        context.world_size,
    )
    saves = run.settings.run_dir is not None and run.settings.save_on_stop
    if saves:
        _save(run, last=True)
    why = signal.Signals(context.stop_signal or number).name + (
        "" if context.stop_signal else f" to rank {rank}"
    )
    raise Preempted(
        f"stopped by {why} after step {run.step}" + ("; a checkpoint is saved" if saves else ""),
        hint=f"the same command with --run {run.settings.run_dir} --resume goes on from here"
        if saves
        else None,
    )


def _finish(run: _Run, started_s: float) -> dict[str, Any]:
    if run.step == 0:
        raise JobError(
            "there was nothing to train on: no step was taken"
            if run.ended is None
            else f"a callback stopped the run before its first step: {run.ended}"
        )
    _before_update(run)
    run.stepper.layout.module.zero_grad()  # their memory is free for evaluating, saving and exporting
    settled = run.stepper.settle(run.step)
    if settled is not None:
        _learn(run, settled)
    stopped = run.ended if run.step != run.job.total_steps else None
    if stopped is not None:
        run.display.say(f"stopped after step {run.step}: {stopped}")
    run.due = {"compare", "evaluate"} | run.due - {"save"}
    _do_what_is_due(run)
    _end_comparison(run)
    run.context.beat("save")
    if run.settings.run_dir is not None:
        assert run.writer is not None
        _end_save(run)
        if run.settings.keep is None or run.settings.keep():
            _save_trained(run)
    if run.control is not None:
        _heed(run, run.control.ask({"event": "end", "step": run.step}))
    if run.copier is not None:
        run.copier.wait()
    run.context.beat("end")
    logs = run.settings.run_dir / "logs" if run.settings.run_dir is not None else None
    if run.stepper.trace is not None and logs is not None:
        run.stepper.trace.write(logs)
    scaling = run.stepper.scaling
    peak_bytes = _greatest(
        run, run.memory.bytes()
    )  # every rank has written its trace when this is known
    core_wait_s = 1e-9 * _greatest(run, run.core_wait.ns)
    if run.stepper.trace is not None and logs is not None and run.context.rank == 0:
        trace.bring_together(logs, logs.parent, run.context.world_size)
    return {
        "plan": str(run.plan),
        "world_size": run.context.world_size,
        "steps": run.step,
        "samples": run.samples,
        "samples_per_s": run.speed.samples_per_s,
        "step_s": run.speed.step_s,
        "later_step_s": run.speed.later_step_s,
        "input_s": run.speed.input_s / max(run.speed.steps, 1),
        "final_loss": run.loss if math.isfinite(run.loss) else None,
        "validation_loss": run.evaluated.get("validation_loss"),
        "metrics": {
            name: value for name, value in run.evaluated.items() if name != "validation_loss"
        },
        "wall_s": time.monotonic() - started_s,
        "core_wait_s": core_wait_s,
        "peak_memory_bytes": peak_bytes,
        "save_blocked_s": run.blocked_s,
        "copy_blocked_s": run.copier.blocked_s if run.copier is not None else 0.0,
        "bytes_sent": round(run.stepper.sent_bytes),
        **reported(run.stepper.synchronisers),
        **({"spikes": run.stepper.spikes.num_spikes} if run.stepper.spikes is not None else {}),
        **(
            {"loss_scale": scaling.scale, "skipped_steps": scaling.skipped_steps}
            if scaling is not None
            else {}
        ),
        **({"stopped": stopped} if stopped is not None else {}),
    }


def _greatest(run: _Run, value: int) -> int:
    """The greatest value over all ranks. Collective."""
    if run.context.world_size == 1:
        return value
    greatest = torch.tensor(value, dtype=torch.int64, device=run.context.device)
    torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX)
    return int(greatest)
