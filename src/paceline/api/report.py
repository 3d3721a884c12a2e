"""`report` and `compare`: show a run as one HTML file, and two runs side by side."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from paceline.api.planning import plan
from paceline.base.errors import PacelineError
from paceline.cluster.cluster import Cluster
from paceline.job.file import JobFile
from paceline.reports.comparison import Comparison, Condition
from paceline.reports.comparison import compare as compared
from paceline.reports.page import Alternatives, prepare, write
from paceline.reports.record import RunRecord
from paceline.runs import folder
from paceline.runs.provenance import note_edits

MOST_PLANS = 8  # plans that the page lists


def report(run: str | Path, *, to: str | Path | None = None, price: bool = True) -> Path:
    """Write one HTML file that needs no network about a run, a search, or a proof. Return its path.

    Args:
        run: A run folder, or that of a search or a verification.
        to: The file; by default `report.html` in the folder.
        price: Whether other plans are priced on this machine, without trying them. This loads the run's job.

    Raises:
        UsageError: the folder is none of these, the package that draws is missing, or the file can't be written.
    """
    path = Path(run)
    if to is not None:
        prepare(Path(to))
    return write(
        path,
        to=None if to is None else Path(to),
        alternatives=_alternatives(path) if price else None,
    )


def compare(first: str | Path, second: str | Path, *, fail_if: Sequence[str] = ()) -> Comparison:
    """Compare two runs.

    Args:
        fail_if: Conditions such as "step_s>5%": the second run's figure is worse than the first
            one's by more than that, and by more than chance explains.

    Raises:
        UsageError: a folder is not that of a run that ended, or a condition can't be read.
    """
    conditions = [Condition.parse(text) for text in fail_if]
    return compared(RunRecord.read(first), RunRecord.read(second), conditions)


def _alternatives(path: Path) -> Alternatives | None:
    """Predict the step time of other plans on this machine."""
    if not (path / folder.PLAN).exists():
        return None
    record = RunRecord.read(path)
    if not record.job:
        return Alternatives(note="The job was made in Python, so other plans were not priced.")
    if record.origin.get("host") != platform.node():
        return Alternatives(
            note=f"The run was on {record.origin.get('host', 'another host')}, so other plans were not "
            "priced here."
        )
    note_edits(path)
    try:
        answer = plan(JobFile.from_dict(dict(record.job)), Cluster.local(), calibrate_s=0.0)
    except (PacelineError, OSError) as error:
        return Alternatives(note=f"Other plans were not priced: {str(error).partition(chr(10))[0]}")
    step_s = next(
        (
            each.estimate.step_s
            for each in answer.ranking.ranked
            if str(each.plan) == record.plan["plan"]
        ),
        None,
    )
    if step_s is None:
        return Alternatives(note="This run's own plan is not among those that were priced.")
    exact = [each for each in answer.ranking.ranked if each.plan.relaxed is None]
    return Alternatives(
        [
            (str(each.plan), each.estimate.step_s / step_s, each.estimate.peak_memory_bytes)
            for each in exact[:MOST_PLANS]
        ],
        "Priced for all devices of this machine, without trying them.",
    )
