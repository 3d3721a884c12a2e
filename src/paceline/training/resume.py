"""Where a run that is resumed goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from paceline.checkpoint.read import Checkpoint
from paceline.training.parts.copied_state import open_newest
from paceline.training.restore import choose_checkpoint, mismatch, restore
from paceline.training.run import RankRun


def resume(run: RankRun, *, before: Callable[[int], int] = lambda step: step) -> Checkpoint | None:
    """Restore the newest state that earlier ranks left in memory, or else in the run folder. Return it; None if the run
    begins. Collective.

    before: what copies in memory count up to the end of a step; see `open_newest`.
    """
    if not run.settings.resume or run.run_dir is None:
        return None
    run.context.beat("restore")
    place = run.context, run.run_dir, partial(mismatch, run.stepper)
    checkpoint = open_newest(*place, before=before)
    run.is_copied = checkpoint is not None
    checkpoint = checkpoint or choose_checkpoint(*place)
    if checkpoint is None:
        run.log.display.say("no checkpoint to resume from: starting at step 0")
        return None
    notes = restore(run.stepper, checkpoint)
    run.step, run.samples = checkpoint.document["step"], checkpoint.document["samples"]
    run.log.display.say("; ".join([f"resumed from {checkpoint.path.name}", *notes]))
    if run.is_copied:
        run.take_figures(checkpoint.document["figures"])
    return checkpoint
