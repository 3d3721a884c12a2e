"""`report` and `compare`: show a run as one HTML file, and two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.base.signatures import renamed
from paceline.reports.comparison import Comparison, Condition
from paceline.reports.comparison import compare as compared
from paceline.reports.page import write
from paceline.reports.record import RunRecord


@renamed(to="output")
def report(run: str | Path, *, output: str | Path | None = None) -> Path:
    """Write one HTML file that needs no network about a run, a search, or a proof. Return its path.

    Nothing of the run's job is loaded.

    Args:
        run: The folder of a run, a search or a verification.
        output: The file, by default `report.html` in the folder.

    Raises:
        UsageError: the folder is none of these, the package that draws is missing, or the file can't be written.
    """
    return write(Path(run), to=None if output is None else Path(output))


def compare(first: str | Path, second: str | Path, *, fail_if: Sequence[str] = ()) -> Comparison:
    """Compare two runs.

    Args:
        first: The folder of a run.
        second: The folder of another run.
        fail_if: A condition such as "step_s>5%", under which the comparison fails. The second run's
            figure is then worse than the first one's by more than that, and by more than chance
            explains.

    Raises:
        UsageError: a folder is not that of a run that ended, or a condition can't be read.
    """
    conditions = [Condition.parse(text) for text in fail_if]
    return compared(RunRecord.read(first), RunRecord.read(second), conditions)
