"""Checkpoints of a run: when they are saved, what is kept of them, and the model at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from paceline.base.errors import PacelineError, Preempted
from paceline.checkpoint.prune import later_saves, prune
from paceline.checkpoint.read import Checkpoint
from paceline.checkpoint.write import Writer, without_snapshots
from paceline.runs.folder import checkpoint_of
from paceline.training import state
from paceline.training.parts.callbacks import Callbacks
from paceline.training.parts.drift import Comparisons
from paceline.training.run import RankRun, RunPart


class Saves(RunPart):
    """Writes checkpoints in the background, from copies of the tensors if there is memory for them."""

    def __init__(
        self, run: RankRun, callbacks: Callbacks, comparisons: Comparisons | None = None
    ) -> None:
        """comparisons: where replicas hold alike what is saved."""
        self.run, self.callbacks, self.comparisons = run, callbacks, comparisons
        self.writer: Writer | None = None
        self.saved_step: int | None = None
        # Saves of checkpoints that the run could not go on from.
        self.passed_over: frozenset[str] = frozenset()
        self._num_exports = 0
        if run.run_dir is not None:
            self.writer = Writer(
                run.run_dir,
                rank=run.context.rank,
                world_size=run.num_writers,
                attempt=run.context.attempt,
                num_ranks=min(run.num_writers, run.context.local_world_size),
                meanwhile=run.keep_alive,
            )
            state.refuse_unsaveable(run.stepper)  # now, not after an hour
            job_state = run.stepper.job_state
            if job_state is not None and (unsaved := job_state.unsaved):
                run.log.display.say(
                    f"checkpoints don't keep what training changes of {', '.join(unsaved[:5])}: "
                    "iterators, open files and large arrays begin anew in a resumed run"
                )

    def restored(self, checkpoint: Checkpoint | None) -> None:
        if self.run.job.parts:
            self.run.document()  # what is wrong with it is known before the first save
        if self.run.log.metrics is not None and self.run.settings.resume:
            self.passed_over = later_saves(self.run.log.metrics.parent, after=self.run.step)

    def counted(self) -> None:
        run = self.run
        self.check()
        if run.settings.save_every and run.step % run.settings.save_every == 0:
            run.due.add("save")

    def settled(self) -> None:
        if "evaluate" not in self.run.due and self.run.takes("save"):  # evaluations come first
            self.save()

    def finished(self) -> None:
        run = self.run
        run.context.beat("save")
        if run.run_dir is not None:
            self.end()
            if run.settings.keep is None or run.settings.keep():
                self._save_trained()

    def figures(self) -> Mapping[str, Any]:
        return {"saved_step": self.saved_step}

    def take_figures(self, figures: Mapping[str, Any]) -> None:
        """A save that the ranks before had begun and not ended is made again."""
        saved_step, run_dir = figures["saved_step"], self.run.run_dir
        if saved_step is not None and run_dir is not None:
            if checkpoint_of(run_dir, saved_step).exists():
                self.saved_step = saved_step
            else:
                self.run.due.add("save")

    def save(self, *, last: bool = False) -> None:
        """Write a checkpoint in the background; after the last step from the tensors themselves, and wait for it.
        Collective."""
        run = self.run
        if self.writer is None:
            return
        run.context.beat("save")
        began_s = time.monotonic()
        self.end()  # the save before is not lost if replicas differ now
        if self.saved_step == run.step:
            return
        run.set_mode(trains=False)
        if self.comparisons is not None:
            self.comparisons.compare()  # what is saved is what all replicas hold
        run.stepper.step_sync.drain()
        run.tell("saving")
        answer = self.callbacks.states()
        run.begin_save(last=last)
        document = run.document() | {"compared": run.stepper.mesh.num_copies}
        if answer:
            document["callbacks"] = answer.get("callbacks")  # rank 0's document counts
        if not last and self.writer.takes_snapshots is None:
            self._decide(self.writer)
        self.saved_step = run.step
        self.writer.save(
            run.step,
            state.pieces(run.stepper),
            document,
            snapshot=not last,
            before_commit=run.log.journal.sync,
        )
        if last:
            self.end()
        self._prune()
        blocked_s = time.monotonic() - began_s
        run.log.blocked_s += blocked_s
        run.note(saved=True, blocked_s=blocked_s)
        if self.callbacks.has("on_save"):
            self.end()
            path = str(self.writer.folder / f"step-{run.step}")
            self.callbacks.tell("on_save", "save", path=path)
        self.callbacks.heed(answer)

    def save_before(self, error: PacelineError) -> None:
        """Save what would be lost with an error that ends the run, and say so in it. Collective."""
        run = self.run
        if run.run_dir is not None and run.settings.save_on_stop and run.step > 0:
            self.save(last=True)
            error.args = (f"{error.args[0]}; a checkpoint is saved",)
            if isinstance(error, Preempted):
                error.hint = f"the same command with --run {run.run_dir} --resume goes on from here"

    def check(self) -> None:
        """Return at once, unless the save in the background has failed.

        Raises:
            CheckpointError: it has.
        """
        if self.writer is not None:
            self.writer.poll()

    def end(self) -> None:
        """Return when what is being saved is committed. Collective."""
        if self.writer is not None:
            self.writer.wait()

    def export_weights(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Give callbacks the weights as they are now, in a checkpoint without the optimizer. Collective."""
        run, run_dir = self.run, self.run.run_dir
        assert order["do"] == "weights" and run_dir is not None
        if self.saved_step == run.step:
            self.end()
            return {"path": str(checkpoint_of(run_dir, run.step)), "is_temporary": False}
        run.set_mode(trains=False)
        run.stepper.step_sync.drain()
        self._num_exports += 1
        folder = run_dir / f".weights-{run.context.attempt}-{self._num_exports}"
        path = state.save_weights(
            run.stepper, folder, run.context, step=run.step, num_ranks=run.num_writers
        )
        run.greatest(0)  # every rank has seen it complete before it is removed
        return {"path": str(path), "is_temporary": True}

    def _decide(self, writer: Writer) -> None:
        """Let saves write from copies if all ranks have memory for them. Collective."""
        pieces = list(state.pieces(self.run.stepper))
        writer.takes_snapshots = not self.run.greatest(not writer.has_memory_for(pieces))
        if not writer.takes_snapshots:
            self.run.warn(without_snapshots(pieces))

    def _prune(self) -> None:
        settings = self.run.settings
        if settings.keep_checkpoints and settings.run_dir is not None and self.run.log.writes:
            prune(settings.run_dir, newest=settings.keep_checkpoints, passed_over=self.passed_over)

    def _save_trained(self) -> None:
        """Write the last checkpoint, and the model by itself."""
        run, context = self.run, self.run.context
        assert run.run_dir is not None
        if self.saved_step != run.step:
            self.save(last=True)
        self._prune()  # of what was being saved then
        if context.rank == 0:
            state.export(run.stepper.model, run.run_dir, step=run.step)
        if context.store is not None:  # a collective would give up after its own time limit
            key = f"exported/{context.num_trained}"
            if context.rank == 0:
                context.store.set(key, "")
            context.hear(key, "save")
