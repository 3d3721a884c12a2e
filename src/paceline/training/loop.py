"""A rank's training run: build, restore, step, evaluate, save, sum up.

The loop knows steps and their end. Everything else of a run is a part; see `training.run.RunPart`.
"""

from __future__ import annotations

import signal
import sys
import time
from functools import cached_property, partial
from typing import Any

from paceline.base.errors import CallbackError, PeerLost, Preempted
from paceline.job import Job
from paceline.launch.process.context import RankContext
from paceline.launch.process.malloc import HeapTrimmer
from paceline.strategies.compose import reported
from paceline.strategies.mesh import Mesh
from paceline.strategies.plan import Plan
from paceline.training.cores import CoreWait
from paceline.training.feed import DataShard, training_feed
from paceline.training.parts import drift
from paceline.training.parts.callbacks import Callbacks
from paceline.training.parts.copies import Copies
from paceline.training.parts.evaluations import Evaluations, RanksEvaluator
from paceline.training.parts.observed import Observed
from paceline.training.parts.saves import Saves
from paceline.training.parts.spike_steps import SpikeSteps
from paceline.training.parts.step_log import StepLog
from paceline.training.parts.tracing import Tracing
from paceline.training.prefetch import Fed, Prefetch
from paceline.training.resume import resume
from paceline.training.run import RunPart, StepTaken, TrainingRun
from paceline.training.run_log import RunLog
from paceline.training.settings import Settings
from paceline.training.shares import refuse_single_samples
from paceline.training.stepper import Stepper, StepResult


def train_rank(context: RankContext, job: Job, plan: Plan, settings: Settings) -> dict[str, Any]:
    """Train on this rank and return the summary, equal on every rank but for the memory.

    Raises:
        Preempted: the run was asked to stop; it saved a checkpoint.
        TrainingError, JobError, CheckpointError: see the message.
    """
    loop = Loop(context, job, plan, settings)
    try:
        return loop.train()
    finally:
        loop.run.log.close()


class Loop:
    """Takes the steps of one rank's run."""

    def __init__(self, context: RankContext, job: Job, plan: Plan, settings: Settings) -> None:
        context.beat("build")
        is_first = context.rank == 0
        shows = is_first and settings.observer is None
        log = RunLog(settings, context.device, writes=is_first, shows=shows)
        mesh = Mesh.of(plan, context.rank)
        mesh.connect()
        refuse_single_samples(job, plan, settings.shares, context.device)
        stepper = Stepper(
            job, plan, mesh, context.device, devices=settings.devices, shares=settings.shares
        )
        self.run = run = TrainingRun(context, job, plan, settings, stepper, log)
        self.heap, self.core_wait = HeapTrimmer(context.device.type), CoreWait()
        self.is_left = False  # the run was asked to stop, and is left as it is
        self.began_s, self.input_s = 0.0, 0.0  # of the step that is next
        self.scale: float | None = None  # by which its loss is multiplied
        comparisons, self.callbacks = drift.Comparisons(run), Callbacks(run)
        self.saves = Saves(run, self.callbacks, comparisons)
        self.callbacks.obey = self.saves.export_weights
        self.copies = Copies(run, self.callbacks)
        self.spikes = SpikeSteps(run)
        evaluations = Evaluations(run, RanksEvaluator(run), self.saves, self.callbacks)
        self.step_log = StepLog(run)
        # The order of their collectives: what a save needs is compared and evaluated before it, and
        # a copy has all that the others did.
        run.parts = [
            self.step_log,
            self.spikes,
            comparisons,
            evaluations,
            *run.parts_of_job(),
            self.saves,
            self.callbacks,
            self.copies,
            Tracing(run),
            *([Observed(run, settings.observer)] if settings.observer is not None else []),
        ]
        observes = any(type(part).gradients is not RunPart.gradients for part in run.parts)
        self.observe = partial(run.tell, "gradients") if observes else None
        drift.check_replicas(drift.replicated(stepper), mesh=mesh, step=0)
        run.tell_layout()

    def train(self) -> dict[str, Any]:
        """See `train_rank`."""
        try:
            self.restore()
            with self.run.context.stoppable():
                if self.run.is_copied:
                    self.run.settle()  # what the ranks before these had not ended
                while (fed := self.fetch()) is not None:
                    self.count(fed, self._take(fed))
                return self.finish()  # a request that comes now must not cost the last checkpoint
        except CallbackError as error:
            self.saves.save_before(error)
            raise
        except (PeerLost, RuntimeError):
            self.saves.check()  # others leave a rank whose save has failed, perhaps before it looks
            raise

    def restore(self) -> None:
        """Go on from where the run is, or begin. Collective."""
        run = self.run
        checkpoint = resume(run)
        if run.settings.resume:
            run.log.go_on(run.step)
        run.log.journal.begin(
            run.job, plan=str(run.plan), world_size=run.context.world_size, after=run.step
        )
        run.tell("restored", checkpoint)

    @cached_property
    def feed(self) -> Prefetch:
        """The samples of the steps that are left."""
        run, job = self.run, self.run.job
        total = job.total_steps if job.total_steps is not None else sys.maxsize
        windows = training_feed(
            job,
            part=DataShard.of(run.plan, run.mesh, run.settings.shares),
            loader_workers=run.settings.loader_workers,
            steps=range(run.step, total),
        )
        return Prefetch(iter(windows), run.context.device, job.input_dtype)

    def read_anew(self) -> None:
        """Let new loader workers read the next steps. They see what the data set holds then."""
        vars(self).pop("feed", None)

    def fetch(self) -> Fed | None:
        """Return the samples of the next step; None if none is left, or the run is to end here."""
        run = self.run
        if run.ended is not None or self.is_left:
            return None
        run.context.step = run.step + 1
        if run.stepper.trace is not None:
            run.stepper.trace.begin(run.step)
        run.beat("input")
        self.began_s = time.perf_counter()
        fed = self.feed.next()
        if fed is None:
            return None
        self.input_s = time.perf_counter() - self.began_s
        self.scale = run.stepper.scaling.scale if run.stepper.scaling is not None else None
        run.tell("before_step", fed)
        run.set_mode(trains=True)
        return fed

    def _take(self, fed: Fed) -> StepResult:
        run, stepper = self.run, self.run.stepper
        with self.spikes.explaining(fed):
            result = stepper.step(
                fed.window,
                fed.placed,
                step=run.step,
                stop=self.is_asked,
                beat=run.beat,
                on_launched=self.on_launched,
                observe=self.observe,
            )
            self.spikes.judge(result)
        return result

    def on_launched(self) -> None:
        """Make the samples of the next step while a GPU computes."""
        if self.feed.copies is not None:
            self.run.beat("input")
            self.feed.prepare_next()
            self.run.beat("reduce")

    def count(self, fed: Fed, result: StepResult) -> None:
        """Count a step that was taken, let every part know, and do what is due. Collective if ranks
        are after the same step."""
        run = self.run
        if run.stepper.trace is not None:
            run.stepper.trace.phase("end")
        step_s = time.perf_counter() - self.began_s
        taken = StepTaken(fed, result, step_s, self.input_s, loss_scale=self.scale)
        run.count(fed.window)
        run.stop = run.stop or bool(result.stop)
        run.tell("stepped", taken)
        run.tell("counted")
        self.heap.poll()
        if result.is_settled and run.step == run.job.total_steps:
            self.copies.settled()  # what comes at the end may take long
        elif result.is_settled:
            run.settle()
            self.is_left = run.stop and self._attend()

    def is_asked(self) -> bool:
        """Whether this rank was asked to stop, or callbacks or the script want something."""
        run = self.run
        return run.context.stop_signal is not None or run.wants_end or self.callbacks.want_attention

    def _attend(self) -> bool:
        """Some rank was asked to stop, or callbacks or the script want something. Returns whether the run is to be
        left as it is."""
        run = self.run
        asked = run.greatest(2 * int(run.context.stop_signal is not None) + int(run.wants_end))
        if asked > 1:
            return True
        run.stop = False
        if asked:
            run.ended = "the script asked for it"
        if self.callbacks.controller is not None:
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
        why = signal.Signals(context.stop_signal or number).name + (
            "" if context.stop_signal else f" to rank {rank}"
        )
        error = Preempted(f"stopped by {why} after step {run.step}")
        self.saves.save_before(error)
        raise error

    def finish(self) -> dict[str, Any]:
        """End the run here, and return its figures. Collective.

        Raises:
            Preempted: it was asked to stop before its last step. It is saved where it is.
        """
        run, stepper = self.run, self.run.stepper
        if self.is_left:
            self._stop()  # a request may reach this rank later than the others that told it
        if run.step == 0:
            raise run.without_steps()
        stepper.layout.module.zero_grad()  # their memory is free for evaluating, saving, exporting
        settled = stepper.settle(run.step)
        if settled is not None:
            run.stop = run.stop or bool(settled.stop)
            self.step_log.learn(settled)
        run.due = {"compare", "evaluate"} | run.due - {"save"}
        run.settle()
        run.tell("finished")
        run.context.beat("end")
        return self._summary()

    def _summary(self) -> dict[str, Any]:
        """Return the run's figures. Collective."""
        run, stepper = self.run, self.run.stepper
        peak_bytes = run.greatest(run.log.memory.bytes())
        core_wait_s = 1e-9 * run.greatest(self.core_wait.ns)
        return {
            **run.summary(),
            "core_wait_s": core_wait_s,
            "peak_memory_bytes": peak_bytes,
            "bytes_sent": round(stepper.sent_bytes),
            **reported(stepper.synchronisers),
        }
