"""Steps that are spikes: their samples are kept, and the run ends, leaves them out, or goes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.checkpoint.read import Checkpoint, newest_saved_step, open_checkpoint
from paceline.runs.folder import checkpoint_of
from paceline.strategies.compose import end_evaluation
from paceline.training.parts.copies import Copies
from paceline.training.parts.drift import Comparisons
from paceline.training.parts.saves import Saves
from paceline.training.parts.spike_dump import first_bad_module, keep
from paceline.training.parts.spikes import Spike, Spikes
from paceline.training.prefetch import Fed
from paceline.training.restore import restore
from paceline.training.run import RunPart, StepTaken, TrainingRun
from paceline.training.stepper import StepResult


class SpikeSteps(RunPart):
    """Does what `on_spike` says about a step whose loss is far above those before. Without it, a loss that is not
    finite ends the run."""

    def __init__(
        self, run: TrainingRun, comparisons: Comparisons, saves: Saves, copies: Copies
    ) -> None:
        self.run, self.comparisons, self.saves, self.copies = run, comparisons, saves, copies
        self.spikes: Spikes | None = None
        if run.settings.on_spike is not None:
            self.spikes = Spikes(run.settings.on_spike)
            run.stepper.watch(self.spikes)

    @contextmanager
    def explaining(self, fed: Fed) -> Iterator[None]:
        """Keep the samples of a step whose spike ends the run, and say where they are and which module it began in."""
        try:
            yield
        except Spike as spike:
            run = self.run
            module = first_bad_module(run.stepper, fed.window, fed.placed, step=run.step)
            why = str(spike.args[0])
            path = self._keep(fed, run.step + 1, why, module)
            evidence = [
                *([f"the first module that returns such numbers is '{module}'"] if module else []),
                *([f"its samples are in {path}"] if path else []),
            ]
            spike.args = ("; ".join([why, *evidence]),)
            raise

    def judge(self, result: StepResult) -> None:
        """
        Raises:
            Spike: the step is one, and the run ends here.
        """
        if result.spike:
            assert self.spikes is not None
            self.spikes.refuse_more(result.spike, self.run.step + 1)

    def restored(self, checkpoint: Checkpoint | None) -> None:
        if self.spikes is not None and checkpoint is not None and "spikes" in checkpoint.document:
            self.spikes.restore(checkpoint.document["spikes"])

    def stepped(self, taken: StepTaken) -> None:
        """Nothing was updated in a step that is a spike: keep its samples, and go back if that was asked for. All ranks
        of such a run are in the same step."""
        why = taken.result.spike
        if not why:
            return
        self._keep(taken.fed, self.run.step, why, None)
        back = self._rewind() if self.run.settings.on_spike == "rewind" else ""
        self.run.log.display.say(
            f"step {self.run.step} is a spike and changes no weight: {why}{back}"
        )

    def document(self) -> Mapping[str, Any]:
        return {"spikes": self.spikes.to_dict()} if self.spikes is not None else {}

    def summary(self) -> Mapping[str, Any]:
        return {"spikes": self.spikes.num_spikes} if self.spikes is not None else {}

    def _keep(self, fed: Fed, step: int, why: str, module: str | None) -> Any:
        run = self.run
        return run.run_dir and keep(
            run.run_dir, run.stepper, fed.window, fed.batches, step=step, why=why, module=module
        )

    def _rewind(self) -> str:
        """Take the state of the newest checkpoint, and leave out the samples of all steps since. Collective.

        Returns:
            What was done, in words.
        """
        run, stepper = self.run, self.run.stepper
        assert run.run_dir is not None and self.spikes is not None
        self.saves.end()
        self.copies.wait()
        step = run.greatest(newest_saved_step(run.run_dir) if run.context.rank == 0 else -1)
        if step < 0:
            return "; there is no checkpoint yet to go back to"
        spikes = self.spikes.to_dict()
        stepper.step_sync.drain()
        end_evaluation(stepper.synchronisers)  # what was gathered is of weights that are replaced
        restore(stepper, open_checkpoint(checkpoint_of(run.run_dir, step), checksums=False))
        stepper.edits.updated()
        run.log.journal.go_back(
            run.job, plan=str(run.plan), world_size=run.context.world_size, after=step
        )
        self.spikes.restore(spikes)
        run.note(rewound_to=step)
        self.comparisons.compared_step = None
        return f"; the weights are those of step {step} again, and the samples of the steps since are left out"
