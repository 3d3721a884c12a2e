"""The same six jobs through Paceline and six other trainers, on two CPU ranks, against one device.

python -m benchmarks.trainers                      # all of them; writes results.json and docs/who-is-right.md
python -m benchmarks.trainers --trainers DDP --jobs idle     # measures these anew and keeps the others
python -m benchmarks.trainers --page               # writes the page from results.json, without a run
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import date
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.trainers.contenders import CONTENDERS, RUNS
from benchmarks.trainers.jobs import JOBS
from benchmarks.trainers.measure import Result, measure
from benchmarks.trainers.page import page
from benchmarks.turns import ROOT

RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "who-is-right.md"


def installed() -> dict[str, str]:
    """Each trainer that is here, and its version."""
    return {
        name: metadata.version(contender.distribution)
        for name, contender in CONTENDERS.items()
        if find_spec(contender.distribution)
    }


def versions(trainers: list[str]) -> dict[str, str]:
    """Of the trainers that are measured now, what is installed; of others, what they were measured with."""
    earlier = json.loads(RESULTS.read_text())["versions"] if RESULTS.exists() else {}
    known = {
        **earlier,
        **{name: version for name, version in installed().items() if name in trainers},
    }
    return {name: known[name] for name in CONTENDERS if name in known}


def kept(trainers: list[str], jobs: list[str]) -> list[Result]:
    """Results of earlier runs that are not measured anew; not those of runs that are no more made."""
    if not RESULTS.exists():
        return []
    results = [Result(**row) for row in json.loads(RESULTS.read_text())["results"]]
    return [
        row
        for row in results
        if (row.trainer not in trainers or row.job not in jobs) and _place(row) in RUNS
    ]


def _place(row: Result) -> tuple[str, str, str]:
    return row.trainer, row.job, row.setting


def document(results: list[Result], trainers: list[str]) -> dict[str, Any]:
    """What results.json holds, in the order of the contenders, the jobs and the settings."""
    results = sorted(results, key=lambda row: RUNS.index(_place(row)))
    return {
        "date": date.today().isoformat(),
        "versions": versions(trainers),
        "results": [asdict(row) for row in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--trainers", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument(
        "--page", action="store_true", help="write the page from results.json, without a run"
    )
    options = parser.parse_args()
    if not options.page:
        missing = [name for name in options.trainers if name not in installed()]
        if missing:
            parser.error(f"not installed: {', '.join(missing)} (pip install -e '.[bench,dev]')")
        results = kept(options.trainers, options.jobs)
        for result in measure(options.trainers, options.jobs):
            print(
                f"{result.trainer} {result.job} {result.setting}: {result.failure or result.weights}",
                file=sys.stderr,
                flush=True,
            )
            results.append(result)
            RESULTS.write_text(json.dumps(document(results, options.trainers), indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
