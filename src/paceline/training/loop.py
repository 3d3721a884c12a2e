"""A rank's training run: build, restore, step, evaluate, save, sum up.

The loop knows steps and their end. Everything else of a run is a part; see `training.run.RunPart`.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from functools import partial
from typing import Any

import torch

from paceline.base.errors import CallbackError, JobError, Preempted
from paceline.base.files import write_json
from paceline.checkpoint.read import Checkpoint
from paceline.job import Job
from paceline.job.order import Order, Window
from paceline.launch.process.context import RankContext
from paceline.launch.process.malloc import HeapTrimmer
from paceline.runs.folder import SPLIT
from paceline.strategies.compose import reported
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.training import trace
from paceline.training.cores import CoreWait
from paceline.training.feed import DataShard, is_stream, training_feed
from paceline.training.parts import drift
from paceline.training.parts.callbacks import Callbacks
from paceline.training.parts.copies import Copies
from paceline.training.parts.evaluations import Evaluations
from paceline.training.parts.saves import Saves
from paceline.training.parts.spike_steps import SpikeSteps
from paceline.training.prefetch import Fed, Prefetch
from paceline.training.restore import choose_checkpoint, mismatch, restore
from paceline.training.run import TrainingRun
from paceline.training.run_log import RunLog, learning_rate
from paceline.training.settings import Settings
from paceline.training.shares import refuse_single_samples
from paceline.training.stepper import Stepper, StepResult


def train_rank(context: RankContext, job: Job, plan: Plan, settings: Settings) -> dict[str, Any]:
    """Train on this rank and return the summary, equal on every rank but for the memory.

    Raises:
        Preempted: the run was asked to stop; it saved a checkpoint.
        TrainingError, JobError, CheckpointError: see the message.
    """
    started_s = time.monotonic()
    loop = Loop(context, job, plan, settings)
    loop.run.log.started_s = started_s
    try:
        return loop.train()
    finally:
        loop.run.log.close()


class Loop:
    """Takes the steps of one rank's run."""

    def __init__(self, context: RankContext, job: Job, plan: Plan, settings: Settings) -> None:
        context.beat("build")
        is_first = context.rank == 0
        log = RunLog(
            settings,
            context.device,
            writes=is_first,
            shows=is_first and settings.observer is None,
        )
        mesh = Mesh.of(plan, context.rank)
        mesh.connect()
        refuse_single_samples(job, plan, settings.shares, context.device)
        stepper = Stepper(
            job, plan, mesh, context.device, devices=settings.devices, shares=settings.shares
        )
        stepper.note_verb = context.note_verb
        self.run = run = TrainingRun(context, job, plan, settings, mesh, stepper, log)
        self.heap, self.core_wait = HeapTrimmer(context.device.type), CoreWait()
        self.order = None if is_stream(job.data) else Order.of(job)
        self._unmet: list[dict[str, Any]] = []  # figures of steps since ranks met
        comparisons, self.callbacks = drift.Comparisons(run), Callbacks(run)
        self.saves = Saves(run, comparisons, self.callbacks)
        self.callbacks.obey = self.saves.export_weights
        self.copies = Copies(run, self.callbacks)
        self.spikes = SpikeSteps(run, comparisons, self.saves, self.copies)
        evaluations = Evaluations(run, self.saves, self.callbacks)
        # The order of their collectives: what a save needs is compared and evaluated before it, and
        # a copy has all that the others did.
        run.parts = [
            self.spikes,
            comparisons,
            evaluations,
            self.saves,
            self.callbacks,
            self.copies,
        ]
        drift.check_replicas(drift.replicated(stepper), mesh=mesh, step=0)
        self._tell_layout()
        stepper.before_update = run.before_update

    def train(self) -> dict[str, Any]:
        """See `train_rank`."""
        run, context = self.run, self.run.context
        try:
            self._restore()
            if run.settings.trace_steps:  # the first step is not like the others
                run.stepper.trace = trace.TraceRecorder(
                    context.rank, range(run.step + 1, run.step + 1 + run.settings.trace_steps)
                )
            with context.stoppable():
                if run.is_copied:
                    run.settle()  # what the ranks before these had not ended
                if run.ended is None and self._steps():
                    self._stop()  # a request may reach this rank later than the others that told it
                return self._finish()  # a request that comes now must not cost the last checkpoint
        except CallbackError as error:
            if run.run_dir is not None and run.settings.save_on_stop and run.step > 0:
                self.saves.save(last=True)
                error.args = (f"{error.args[0]}; a checkpoint is saved",)
            raise

    def _tell_layout(self) -> None:
        """Say how the model was laid out, where there is something to say."""
        run, report = self.run, self.run.stepper.layout.report
        if run.run_dir is not None and (unsaved := run.stepper.job_state.unsaved):
            run.log.display.say(
                f"checkpoints don't keep what training changes of {', '.join(unsaved[:5])}: iterators, open "
                "files and large arrays begin anew in a resumed run"
            )
        for line in report.lines:
            run.log.display.say(line)
        if report.document and run.run_dir is not None and run.context.rank == 0:
            write_json(run.run_dir / SPLIT, report.document)

    def _restore(self) -> None:
        run, checkpoint = self.run, None
        if run.settings.resume and run.run_dir is not None:
            run.context.beat("restore")
            accept = partial(mismatch, run.stepper)
            copied = self.copies.open_newest(accept)
            checkpoint = copied or choose_checkpoint(run.context, run.run_dir, accept=accept)
            self._go_on_from(checkpoint)
            if copied is not None:
                run.is_copied = True
                run.take_figures(copied.document["figures"])
            run.log.go_on(run.step)
        run.log.journal.begin(
            run.job, plan=str(run.plan), world_size=run.context.world_size, after=run.step
        )
        for part in run.parts:
            part.restored(checkpoint)

    def _go_on_from(self, checkpoint: Checkpoint | None) -> None:
        run = self.run
        if checkpoint is None:
            run.log.display.say("no checkpoint to resume from: starting at step 0")
            return
        notes = restore(run.stepper, checkpoint)
        run.step, run.samples = checkpoint.document["step"], checkpoint.document["samples"]
        run.log.display.say("; ".join([f"resumed from {checkpoint.path.name}", *notes]))

    def _steps(self) -> bool:
        """Take every step that is left, or until the run is ended. Returns whether it was asked to stop."""
        run, job = self.run, self.run.job
        feed = Prefetch(
            self._feed(), run.context.device, torch.float64 if job.precision == "float64" else None
        )
        while True:
            run.context.step = run.step + 1
            if run.stepper.trace is not None:
                run.stepper.trace.begin(run.step)
            run.beat("input")
            began_s = time.perf_counter()
            fed = feed.next()
            if fed is None:
                return False
            input_s = time.perf_counter() - began_s
            result, figures = self._take(fed, feed)
            step_s = time.perf_counter() - began_s
            self._note(fed.window, result, {**figures, "step_s": step_s}, input_s)
            for part in run.parts:
                part.stepped(fed, result)
            if result.losses:
                run.log.show(run.step, job.total_steps, run.epoch)
            if result.is_settled and run.step == job.total_steps:
                self.copies.settled()  # what comes at the end may take long
            elif result.is_settled:
                run.settle()
                if run.stop and self._attend():
                    return True
                if run.ended is not None:
                    return False

    def _take(self, fed: Fed, feed: Prefetch) -> tuple[StepResult, dict[str, Any]]:
        """Take one step. Returns its result, and the figures that are known of it now."""
        run, stepper, observer = self.run, self.run.stepper, self.run.settings.observer

        def on_launched() -> None:
            if feed.copies is not None:
                run.beat("input")
                feed.prepare_next()
                run.beat("reduce")

        if observer is not None:
            if not stepper.has_begun:
                observer.initial(stepper)
            observer.samples(run.step, fed.batches)
        figures = {} if stepper.scaling is None else {"loss_scale": stepper.scaling.scale}
        run.set_mode(trains=True)
        with self.spikes.explaining(fed):
            result = stepper.step(
                fed.window,
                fed.placed,
                step=run.step,
                stop=self._is_asked,
                beat=run.beat,
                on_launched=on_launched,
                observe=partial(observer.gradients, run.step) if observer else None,
            )
            self.spikes.judge(result)
        if stepper.trace is not None:
            stepper.trace.phase("end")
        return result, figures

    def _is_asked(self) -> bool:
        """Whether this rank was asked to stop, or callbacks want something."""
        return self.run.context.stop_signal is not None or self.callbacks.want_attention

    def _feed(self) -> Any:
        run = self.run
        total = run.job.total_steps if run.job.total_steps is not None else sys.maxsize
        return iter(
            training_feed(
                run.job,
                order=self.order,
                part=DataShard.of(run.plan, run.mesh, run.settings.shares),
                loader_workers=run.settings.loader_workers,
                steps=range(run.step, total),
            )
        )

    def _note(
        self, window: Window, result: StepResult, figures: dict[str, Any], input_s: float
    ) -> None:
        """Count a step, and record all steps whose losses are known now."""
        run, log, observer = self.run, self.run.log, self.run.settings.observer
        run.step, run.samples, run.epoch = run.step + 1, run.samples + window.count, window.epoch
        log.speed.add(window.count, figures["step_s"], input_s=input_s)
        if result.gradient_norm is not None:
            figures["gradient_norm"] = result.gradient_norm
        if result.is_skipped:
            figures |= {"skipped": True, **({"spike": result.spike} if result.spike else {})}
        self._unmet.append(
            {
                "step": run.step,
                "epoch": window.epoch,
                "samples": run.samples,
                "lr": learning_rate(run.stepper.optimizer),
                **figures,
            }
        )
        log.journal.note(run.step, window, skipped=result.is_skipped)
        self._learn(result)
        if observer is not None and observer.weights(run.step - 1, run.stepper, log.loss):
            run.ended = "its observer said so"
        self.heap.poll()

    def _learn(self, result: StepResult) -> None:
        """Record the steps whose losses are known now."""
        run, log = self.run, self.run.log
        run.stop = run.stop or bool(result.stop)
        if result.losses:
            for figures, loss in zip(self._unmet, result.losses, strict=True):
                # That of a step that was skipped may be anything.
                log.note(**figures, loss=loss if math.isfinite(loss) else None)
            finite = (loss for loss in reversed(result.losses) if math.isfinite(loss))
            log.loss = next(finite, log.loss)
            self._unmet = []
            log.journal.settle(result.digest)

    def _attend(self) -> bool:
        """Some rank was asked to stop, or callbacks want something. Returns whether the run is to be left as it is."""
        run = self.run
        if self.callbacks.control is None or run.greatest(int(run.context.stop_signal is not None)):
            return True
        run.stop = False
        self.callbacks.take()
        run.settle()
        return False

    def _stop(self) -> None:
        """Save where the run is and leave, because it was asked to. Collective."""
        run, context = self.run, self.run.context
        number, rank = divmod(
            run.greatest((context.stop_signal or 0) * context.world_size + context.rank),
            context.world_size,
        )
        saves = run.run_dir is not None and run.settings.save_on_stop
        if saves:
            self.saves.save(last=True)
        why = signal.Signals(context.stop_signal or number).name + (
            "" if context.stop_signal else f" to rank {rank}"
        )
        raise Preempted(
            f"stopped by {why} after step {run.step}"
            + ("; a checkpoint is saved" if saves else ""),
            hint=f"the same command with --run {run.run_dir} --resume goes on from here"
            if saves
            else None,
        )

    def _finish(self) -> dict[str, Any]:
        run, stepper = self.run, self.run.stepper
        if run.step == 0:
            raise JobError(
                "there was nothing to train on: no step was taken"
                if run.ended is None
                else f"a callback stopped the run before its first step: {run.ended}"
            )
        run.before_update()
        stepper.layout.module.zero_grad()  # their memory is free for evaluating, saving, exporting
        settled = stepper.settle(run.step)
        if settled is not None:
            self._learn(settled)
        stopped = run.ended if run.step != run.job.total_steps else None
        if stopped is not None:
            run.log.display.say(f"stopped after step {run.step}: {stopped}")
        run.due = {"compare", "evaluate"} | run.due - {"save"}
        run.settle()
        for part in run.parts:
            part.finished()
        run.context.beat("end")
        return self._summary() | ({} if stopped is None else {"stopped": stopped})

    def _summary(self) -> dict[str, Any]:
        """Write the trace, and return the run's figures. Collective."""
        run, stepper, speed = self.run, self.run.stepper, self.run.log.speed
        logs = run.run_dir / "logs" if run.run_dir is not None else None
        if stepper.trace is not None and logs is not None:
            stepper.trace.write(logs)
        # Every rank has written its trace when this is known.
        peak_bytes = run.greatest(run.log.memory.bytes())
        core_wait_s = 1e-9 * run.greatest(self.core_wait.ns)
        if stepper.trace is not None and logs is not None and run.context.rank == 0:
            trace.bring_together(logs, logs.parent, run.context.world_size)
        summary: dict[str, Any] = {
            "plan": str(run.plan),
            "world_size": run.context.world_size,
            "steps": run.step,
            "samples": run.samples,
            **run.log.summary(),
            "input_s": speed.input_s / max(speed.steps, 1),
            "core_wait_s": core_wait_s,
            "peak_memory_bytes": peak_bytes,
            "bytes_sent": round(stepper.sent_bytes),
            **reported(stepper.synchronisers),
        }
        if stepper.scaling is not None:
            summary["loss_scale"] = stepper.scaling.scale
            summary["skipped_steps"] = stepper.scaling.skipped_steps
        for part in run.parts:
            summary |= part.summary()
        return summary
