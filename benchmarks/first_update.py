"""Seconds that the check of a run's first update takes, beside a step of the run.

python -m benchmarks.first_update [--rounds 7] [--plans PLAN...] [--json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.turns import ROOT, ContenderFailed, paceline, run_command, take_turns, warn_if_busy

PLANS = ("data=2", "shard=2", "pipeline=2")
STEPS = {
    "02_gpt_bytes.py": 14,
    "01_digits.py": 40,
}  # of a run; its first 10 are left out of a step's time


@dataclass(frozen=True, slots=True)
class Run:
    """check_s: of the whole check, its processes' start included. step_s: of the run's steps after the first 10."""

    check_s: float
    step_s: float


def run_checked(example: str, plan: str) -> Run:
    """A short run through the public command, with a file that no earlier check was about."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        job = shutil.copy(ROOT / "examples" / example, folder)
        output = run_command(
            paceline(
                "train",
                str(job),
                "--plan",
                plan,
                "--steps",
                str(STEPS[example]),
                "--run",
                str(Path(folder) / "run"),
                "--json",
            ),
            threads=None,
        )
    summary = json.loads(output)
    if summary["check"]["verdict"] != "passed":
        raise ContenderFailed(f"the check ended with {summary['check']}")
    return Run(summary["check"]["seconds"], summary["step_s"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_update", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    parser.add_argument("--plans", nargs="+", default=PLANS, metavar="PLAN")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    warn_if_busy()
    runs: dict[str, list[Run]] = {}
    contenders = {
        f"{example} {plan}": partial(run_checked, example, plan)
        for example in STEPS
        for plan in options.plans
    }
    for number, name, result in take_turns(contenders, rounds=options.rounds):
        if isinstance(result, ContenderFailed):
            raise SystemExit(f"round {number + 1}: {name} failed: {result}")
        runs.setdefault(name, []).append(result)
        print(
            f"round {number + 1}: {name} check {result.check_s:.2f} s, step {result.step_s:.4f} s",
            file=sys.stderr,
        )
    rows = {
        name: {
            "check_s": statistics.median(run.check_s for run in job_runs),
            "step_s": statistics.median(run.step_s for run in job_runs),
            "steps": statistics.median(run.check_s / run.step_s for run in job_runs),
        }
        for name, job_runs in runs.items()
    }
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'':<28} {'check s':>8} {'step s':>8}   check / step, medians of {options.rounds}")
    for name, row in rows.items():
        print(f"{name:<28} {row['check_s']:>8.2f} {row['step_s']:>8.4f} {row['steps']:>8.1f}")


if __name__ == "__main__":
    main()
