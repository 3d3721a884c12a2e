"""Steps that are spikes: their samples are kept, and the run ends or leaves them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from paceline.checkpoint.read import Checkpoint
from paceline.training.parts.spike_dump import first_bad_module, keep
from paceline.training.parts.spikes import Spike, Spikes
from paceline.training.prefetch import Fed
from paceline.training.run import RunPart, StepTaken, TrainingRun
from paceline.training.stepper import StepResult


class SpikeSteps(RunPart):
    """Does what `on_spike` says about a step whose loss is far above those before. Without it, a loss that is not
    finite ends the run."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
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
            path = None
            with suppress(OSError):  # on a full disk, too, the spike is what ended the run
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
        """Nothing was updated in a step that is a spike: keep its samples."""
        why = taken.result.spike
        if not why:
            return
        self._keep(taken.fed, self.run.step, why, None)
        self.run.log.display.say(f"step {self.run.step} is a spike and changes no weight: {why}")

    def document(self) -> Mapping[str, Any]:
        return {"spikes": self.spikes.to_dict()} if self.spikes is not None else {}

    def summary(self) -> Mapping[str, Any]:
        return {"spikes": self.spikes.num_spikes} if self.spikes is not None else {}

    def _keep(self, fed: Fed, step: int, why: str, module: str | None) -> Any:
        run = self.run
        return run.run_dir and keep(
            run.run_dir, run.stepper, fed.window, fed.batches, step=step, why=why, module=module
        )
