"""What a checkpoint costs a run: how long a save blocks it, and how much slower the steps beside the writing are.

    python -m benchmarks.saves [--rounds 3] [--plans PLAN...] [--width 4096 --layers 5] [--steps 60] [--json]

The model is a perceptron under AdamW, by default of 84 million parameters, whose checkpoint has 1.0 GB. A run saves at
a third and at two thirds of its steps. The first save takes its memory from the system, and the second one has it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.turns import (
    ROOT,
    ContenderFailed,
    Record,
    document,
    measure,
    paceline,
    run_command,
    warn_if_busy,
)

JOB = ROOT / "benchmarks" / "contenders" / "saves" / "perceptron.py"
PLANS = ("single", "data=2", "shard=2")
SAVES = 2  # of a run, beside the one at its end


@dataclass(frozen=True, slots=True)
class Run:
    """gigabytes: of a checkpoint, in 1e9 bytes. first_blocked_s, blocked_s: how long the first and the second save
    blocked the run. written_s: from the second save to its COMMIT. step_s: of a step with no writing beside it, in the
    median. beside: the mean of the steps beside the writing of both, as a multiple of that."""

    gigabytes: float
    first_blocked_s: float
    blocked_s: float
    written_s: float
    step_s: float
    beside: float


def saved(plan: str, width: int, layers: int, steps: int) -> Run:
    """One run through the public command."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", dir=Path.cwd()) as folder:
        run = Path(folder) / "run"
        settings = (f"width={width}", f"layers={layers}", f"steps={steps}")
        run_command(
            paceline(
                "train",
                str(JOB),
                "--plan",
                plan,
                "--run",
                str(run),
                "--check",
                "no",
                "--save-every",
                str(steps // (SAVES + 1)),
                *(word for setting in settings for word in ("--set", setting)),
            )
        )
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        commits = [
            run / "checkpoints" / f"step-{number * (steps // (SAVES + 1))}" / "COMMIT"
            for number in range(1, SAVES + 1)
        ]
        num_bytes = sum(path.stat().st_size for path in commits[0].parent.iterdir())
        ends_s = [commit.stat().st_mtime for commit in commits]
    saves = [record for record in records if record.get("saved")][:SAVES]
    spans = [(save["time"], end_s) for save, end_s in zip(saves, ends_s, strict=True)]
    beside, alone = [], []
    for step in records:
        if "step_s" in step and step["step"] > 2:  # the first ones take memory from the system
            is_beside = any(
                step["time"] > began_s and step["time"] - step["step_s"] < end_s
                for began_s, end_s in spans
            )
            (beside if is_beside else alone).append(step["step_s"])
    if not beside:
        raise ContenderFailed("no step ran beside the writing")
    return Run(
        num_bytes / 1e9,
        saves[0]["blocked_s"],
        saves[1]["blocked_s"],
        spans[1][1] - spans[1][0],
        statistics.median(alone),
        statistics.fmean(beside) / statistics.median(alone),
    )


def _say(run: Run) -> str:
    return (
        f"{run.gigabytes:.2f} GB blocked {run.first_blocked_s:.3f} s, then {run.blocked_s:.3f} s; written in "
        f"{run.written_s:.2f} s; steps of {run.step_s:.3f} s take {run.beside:.2f} times as long beside it"
    )


def main(
    rounds: int, plans: Sequence[str], width: int, layers: int, steps: int, *, as_json: bool
) -> None:
    warn_if_busy()
    contenders: dict[str, tuple[str, Callable[[], Run]]] = {
        plan: ("paceline", partial(saved, plan, width, layers, steps)) for plan in plans
    }
    records: dict[str, Record[Run]] = measure(contenders, rounds=rounds, say=_say)
    if as_json:
        print(json.dumps(document(records, {}), indent=1))
        return
    print(f"{'plan':20}    GB  blocked s: first, then  written s   step s  beside")
    for name, record in records.items():
        if record.skipped:
            print(f"{name:20} {record.skipped}")
            continue
        median = record.median
        print(
            f"{name:20} {median('gigabytes'):5.2f}  {median('first_blocked_s'):16.3f}  {median('blocked_s'):5.3f}  "
            f"{median('written_s'):9.2f}  {median('step_s'):7.3f}  {median('beside'):5.2f}x"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(sys.argv[1:])
    main(
        options.rounds,
        options.plans,
        options.width,
        options.layers,
        options.steps,
        as_json=options.json,
    )
