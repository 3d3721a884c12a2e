"""One run, with all that lets a run survive or without any of it, as seconds a step.

    python -m benchmarks.contenders.overhead.run FILE PLAN STEPS with|without

Paceline has no switch for most of this. Without: no copies (restarts=0), no journal, no comparison of replicas, no
signs of life, and nobody who looks at them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import paceline as pl
from benchmarks.workload import WARM_UP_STEPS
from paceline.launch.context import RankContext
from paceline.launch.outside_watch import OutsideWatch
from paceline.runtime import drift
from paceline.runtime.journal import Journal


def nothing(*_: Any, **__: Any) -> None:
    """In place of what is left out."""


def leave_out() -> None:
    """For this process and its forks."""
    drift.check_replicas = nothing
    RankContext.beat = OutsideWatch.look = nothing  # type: ignore[method-assign, assignment]
    Journal.begin = Journal.note = Journal.settle = nothing  # type: ignore[method-assign, assignment]


def main(file: str, plan: str, steps: str, how: str) -> None:
    options: dict[str, Any] = {}
    if how == "without":
        leave_out()
        options["restarts"] = 0
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        pl.train(pl.load(file), plan, steps=WARM_UP_STEPS + int(steps), run=Path(folder) / "run", check=False,
                 table=False, **options)
        lines = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        ends_s = [line["time"] for line in lines if "step_s" in line]
    print(json.dumps({"step_s": (ends_s[-1] - ends_s[WARM_UP_STEPS - 1]) / int(steps)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
