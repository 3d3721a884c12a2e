"""Whether `paceline.verify` sees a bug that is planted in the sources: what `scripts/mutate` runs.

`python -m tests.corpus.mutation` verifies the short form, job by job, under verify's own plans and settings, and prints
a line of JSON for each job. With the lines of a run without a bug it stops at the first job that shows a difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

JOBS = ("combined_regression", "combined_tokens", "combined_statistics", "combined_experts", "causal_attention",
        "combined_norms", "augmentation")
# The first lines of what each plan's certificate says; None if it passed.
Verdicts = dict[str, str | None]


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(prog="python -m tests.corpus.mutation", description=__doc__)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS))
    parser.add_argument("--sound", type=Path, help="what this printed for the sources without a bug")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sound = read(given.sound) if given.sound else {}
    for name in given.jobs:
        found = verdicts(name)
        print(json.dumps({"job": name, "plans": found}), flush=True)
        if sound and difference(sound.get(name, {}), found):
            break
    return 0


def verdicts(name: str) -> Verdicts:
    """What verify says of a job, by plan."""
    import paceline
    from paceline.errors import PacelineError

    from .registry import entries

    job, = (entry.make() for entry in entries(name))
    try:
        return {each.plan: None if each.passed or each.refused else each.describe() for each in paceline.verify(job)}
    except PacelineError as error:
        return {"one device": str(error)}


def read(path: Path) -> dict[str, Verdicts]:
    """The lines that this printed, by job."""
    return {line["job"]: line["plans"] for line in map(json.loads, path.read_text().splitlines())}


def difference(sound: Mapping[str, str | None], found: Mapping[str, str | None]) -> tuple[str, str] | None:
    """The first plan that passes without the bug and fails with it, and why; None if there is none."""
    for plan, why in found.items():
        if why is not None and sound.get(plan, None) is None:
            return plan, why
    return None


def caught_by(sound: Mapping[str, Verdicts], lines: Sequence[Mapping[str, Any]]) -> tuple[str, str, str] | None:
    """The job, the plan and the reason by which a bug was caught; None if it survived."""
    for line in lines:
        seen = difference(sound.get(line["job"], {}), line["plans"])
        if seen is not None:
            return (line["job"], *seen)
    return None


if __name__ == "__main__":
    sys.exit(main())
