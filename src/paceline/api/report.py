"""`report` and `compare`: show a run as one HTML file, and two runs side by side."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from paceline.api.calibration import MOST_TRIALS, with_trials
from paceline.api.known_trials import KnownTrials
from paceline.api.links import with_links
from paceline.base.errors import PacelineError, PlanError
from paceline.base.signatures import renamed
from paceline.cluster.cluster import Cluster
from paceline.cluster.gpu_use import apart_from_cuda
from paceline.job.file import JobFile, open_job
from paceline.planner.corrections import Calibration
from paceline.planner.problem import PlanningProblem
from paceline.planner.search import Candidate, best_of_each_kind
from paceline.reports.comparison import Comparison, Condition
from paceline.reports.comparison import compare as compared
from paceline.reports.page import REPORT, Alternatives, prepare, write
from paceline.reports.record import RunRecord
from paceline.runs import folder
from paceline.runs.provenance import note_edits
from paceline.strategies.plan import Plan

MOST_PLANS = 8  # plans that the page lists


@renamed(to="output", price="other_plans")
def report(run: str | Path, *, output: str | Path | None = None, other_plans: bool = True) -> Path:
    """Write one HTML file that needs no network about a run, a search, or a proof. Return its path.

    Args:
        run: The folder of a run, a search or a verification.
        output: The file, by default `report.html` in the folder.
        other_plans: Whether other plans are priced on this machine, which loads the run's job. They are
            not tried. Those that the run knows because its plan was chosen are not priced again.

    Raises:
        UsageError: the folder is none of these, the package that draws is missing, or the file can't be written.
    """
    path = Path(run)
    to = path / REPORT if output is None else Path(output)
    prepare(to)  # pricing other plans takes a while
    return write(
        path,
        to=to,
        alternatives=_considered(path) or (_alternatives(path) if other_plans else None),
    )


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


def _considered(path: Path) -> Alternatives | None:
    """Return the plans that were considered when the run's plan was chosen; None if none were."""
    if not (path / folder.PLAN).exists():
        return None
    predicted = RunRecord.read(path).predicted
    considered, step_s = predicted.get("considered"), predicted.get("step_s")
    if not considered or not step_s:
        return None
    return Alternatives(
        [
            (each["plan"], each["step_s"] / step_s, each["peak_memory_bytes"])
            for each in considered[:MOST_PLANS]
        ],
        "The best plan of each kind, by the prices from which this run's plan was chosen.",
    )


def _alternatives(path: Path) -> Alternatives | None:
    """Return other plans that this machine allows."""
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
        plans = apart_from_cuda(lambda: _priced(record))
    except (PacelineError, OSError) as error:
        return Alternatives(note=f"Other plans were not priced: {str(error).partition(chr(10))[0]}")
    return Alternatives(
        plans,
        "Priced for all devices of this machine, without trying them; prices are corrected by what "
        "this run took.",
    )


def _priced(record: RunRecord) -> list[tuple[str, float, int]]:
    """Return the best exact plan of each kind, with its step by this run's and its memory.

    Raises:
        PacelineError: the run's own plan has no price here, or does not fit.
    """
    _, job = open_job(JobFile.from_dict(dict(record.job)))
    cluster, own = with_links(Cluster.local()), Plan.parse(record.plan["plan"])
    problem = PlanningProblem.of(job, device=cluster.first_here)
    ranking = problem.search(cluster)
    if all(candidate.plan != own for candidate in ranking.ranked):
        ranking.ranked.append(Candidate(own, problem.price(own, cluster)))
    known = KnownTrials.read(problem, cluster)
    step_s, peak_bytes = record.summary.get("step_s"), record.summary.get("peak_memory_bytes")
    if step_s and peak_bytes:
        known.trials = [
            *known.trials,
            *[(own, Calibration(step_s, round(peak_bytes)))] * MOST_TRIALS,
        ]
    plans = with_trials(ranking, known)
    own_s = next((each.estimate.step_s for each in plans.ranked if each.plan == own), None)
    if own_s is None:
        raise PlanError(f"'{own}', this run's plan, does not fit here")
    exact = [each for each in plans.ranked if each.plan.relaxed is None]
    return [
        (str(each.plan), each.estimate.step_s / own_s, each.estimate.peak_memory_bytes)
        for each in best_of_each_kind(exact)[:MOST_PLANS]
    ]
