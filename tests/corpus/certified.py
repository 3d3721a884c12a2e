"""What `paceline verify` says of the corpus: it must not fail exact plans.

Jobs are in float32, as those of most users; verify judges them in float64 too. A few have float64 numbers in their loss
or their data, and are judged only in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import paceline
from paceline.base.errors import PacelineError, UsageError
from paceline.launch.process.failure import RankFailed

from .registry import Entry
from .sweep import COUPLED, EXACT, REFUSED, WRONG, Cell, first_line, preload

# A plan that cuts the batch unevenly, and one that splits the model into stages.
CERTIFIED_PLANS = ("data=2 shares=3:1", "pipeline=2")
_VERDICTS = {
    "passed": EXACT,
    "coupled": COUPLED,
    "refused": REFUSED,
    "inconclusive": "inconclusive",
    "failed": WRONG,
}


def certify(
    jobs: Sequence[Entry], plans: Sequence[str], say: Callable[[str], None], *, timeout_s: float
) -> list[Cell]:
    """A cell for each job and plan. What verify calls failed or refuses to judge counts as wrong."""
    preload(jobs)
    cells: list[Cell] = []
    for entry in jobs:
        started_s = time.monotonic()
        cells += (new_cells := _of(entry, plans, timeout_s))
        for cell in new_cells:
            cell.seconds = (time.monotonic() - started_s) / len(new_cells)
            if cell.verdict not in (EXACT, COUPLED, REFUSED):
                say(f"{cell.verdict}: {cell.job} under {cell.plan}: {cell.reason}")
    return cells


def _of(entry: Entry, plans: Sequence[str], timeout_s: float) -> list[Cell]:
    cells = []
    for plan in plans:
        try:
            certificate = _certificate(entry.make(), plan, timeout_s)
            cells.append(
                Cell(entry.name, plan, _VERDICTS[certificate.verdict], certificate.reason or "")
            )
        except PacelineError as error:
            verdict = REFUSED if isinstance(error, UsageError) else WRONG
            cells.append(Cell(entry.name, plan, verdict, first_line(error), trace=str(error)))
    return cells


def _certificate(job: paceline.Job, plan: str, timeout_s: float) -> paceline.Certificate:
    if job.precision == "float64":
        with suppress(RankFailed):
            (certificate,) = paceline.verify(
                replace(job, precision="float32"), [plan], steps=3, timeout_s=timeout_s
            )
            return certificate
    (certificate,) = paceline.verify(job, [plan], steps=3, timeout_s=timeout_s)
    return certificate
