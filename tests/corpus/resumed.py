"""Runs that stop at an odd step under one plan and go on under another."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

from paceline.base.errors import PacelineError, UsageError

from .registry import Entry, entries
from .sweep import EXACT, REFUSED, WHOLE, Cell, Sweep, failed_cell, first_line, train_quietly

STOPPED_STEP = 3
# Plans before and after a stop. Those of the second list cut no batch, so coupled jobs are exact under them.
PAIRS = (("data=2", "shard=2"), ("shard=2", "pipeline=2"), ("servers=1 workers=2", "single"))
WHOLE_PAIRS = (("single", "tensor=2"), ("place=2", "single"))
JOBS = (
    "nadam,adam_amsgrad,asgd,muon_and_adamw,average_in_state,groups_by_kind,schedule_one_cycle,"
    "schedule_linear_then_step,stream_with_noise,augmentation,tied_embedding,validation,idle_expert,"
    "self_distillation,muon_beside_adamw,three_models,q_learning,cycles,mean_of_weights,mixed_pairs"
)
COUPLED_JOBS = (
    "batch_norm,counter_warm_up,counter_in_a_buffer,dino_centre,byol_target,late_buffer,codebook"
)


def resume_check(sweep: Sweep) -> list[Cell]:
    """A cell for each job and pair of plans."""
    exact, coupled = entries(JOBS), entries(COUPLED_JOBS)
    return [*_under(sweep, [*exact, *coupled], WHOLE_PAIRS), *_under(sweep, exact, PAIRS)]


def _under(sweep: Sweep, jobs: Sequence[Entry], pairs: Sequence[tuple[str, str]]) -> list[Cell]:
    sweep.learn([(entry, WHOLE) for entry in jobs])
    cells = []
    for first, then in pairs:
        under = [_resumed(sweep, entry, first, then) for entry in jobs]
        sweep.say(
            f"{first} -> {then}: {sum(cell.verdict == EXACT for cell in under)} of {len(under)} exact"
        )
        cells += under
    return cells


def _resumed(sweep: Sweep, entry: Entry, first: str, then: str) -> Cell:
    run, name, started_s = sweep.folder / "resumed", f"{first} -> {then}", time.monotonic()
    shutil.rmtree(run, ignore_errors=True)
    try:
        train_quietly(entry, first, run, timeout_s=sweep.timeout_s, steps=STOPPED_STEP, check=False)
    except PacelineError as error:
        return replace(failed_cell(entry, name, error, run), seconds=time.monotonic() - started_s)
    try:
        train_quietly(entry, then, run, timeout_s=sweep.timeout_s, resume=True, check=False)
        cell = sweep.compared(entry, name, run)
    except UsageError as error:
        cell = Cell(entry.name, name, REFUSED, first_line(error), trace=str(error))
    except PacelineError as error:
        cell = failed_cell(entry, name, error, sweep.folder / "nothing")
    return replace(cell, seconds=time.monotonic() - started_s)
