"""Removes old checkpoints of a run, but neither its newest ones nor its best."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.base.files import remove
from paceline.checkpoint.write import committed_by
from paceline.runs.folder import BEST, METRICS, checkpoints_of


def later_saves(run_dir: Path, *, after: int) -> frozenset[str]:
    """Return the saves of checkpoints of later steps than the one from which a run continues.

    Those checkpoints were damaged, or did not suit the run.
    """
    return frozenset(
        save
        for step, path in checkpoints_of(run_dir).items()
        if step > after and (save := committed_by(path)) is not None
    )


def prune(run_dir: Path, *, newest: int, passed_over: Collection[str] = ()) -> None:
    """Delete the checkpoints of a run that need not be kept. A checkpoint that can't be removed
    stays.

    It keeps the newest complete checkpoints, the one with the least validation loss, and those that
    `KeepBest` keeps. Only the process that commits a run's checkpoints may call it.

    Args:
        newest: How many of the newest complete checkpoints to keep.
        passed_over: Saves whose checkpoints stay and do not count, because the run could not
            continue from them.
    """
    complete = {
        step: path
        for step, path in checkpoints_of(run_dir).items()
        if not passed_over or committed_by(path) not in passed_over
    }
    kept = {*sorted(complete)[-newest:], *_kept_as_best(run_dir)}
    losses = {step: loss for step, loss in _evaluated(run_dir) if step in complete}
    if losses:
        kept.add(min(losses, key=lambda step: losses[step]))
    for step, path in complete.items():
        if step not in kept:
            # Under this name it is no checkpoint, and the next launch removes what is left of it.
            half_removed = path.with_name(f".{path.name}.pruned")
            with suppress(OSError):
                path.rename(half_removed)
                remove(half_removed)


def _evaluated(run_dir: Path) -> Iterator[tuple[int, float]]:
    """Yield the step and the validation loss of each evaluation. Evaluations of the same step keep
    their order.
    """
    with suppress(OSError), (run_dir / METRICS).open() as file:
        for line in file:
            if '"validation_loss"' in line:
                with suppress(ValueError, LookupError, TypeError):
                    figures = json.loads(line)
                    if (loss := float(figures["validation_loss"])) == loss:
                        yield int(figures["step"]), loss


def _kept_as_best(run_dir: Path) -> set[int]:
    with suppress(OSError, ValueError, LookupError, TypeError):
        document: Any = json.loads((run_dir / BEST).read_text())
        return {int(entry["step"]) for entry in document["checkpoints"]}
    return set()
