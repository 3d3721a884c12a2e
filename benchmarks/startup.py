"""Seconds from the command to the end of the first optimizer step on two CPU ranks, beside torchrun on a bare script.

python -m benchmarks.startup [--rounds 11] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.turns import (
    ROOT,
    ContenderFailed,
    paceline,
    ratio,
    run_command,
    take_turns,
    torchrun,
    warn_if_busy,
)

EXAMPLE = ROOT / "examples" / "01_digits.py"  # a small net: its step takes no time beside the start


def paceline_s() -> float:
    """The run's own record says at what time the first step was done."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        run = Path(folder) / "run"
        started_s = time.time()
        run_command(
            paceline("train", str(EXAMPLE), "--plan", "data=2", "--steps", "1", "--run", str(run))
        )
        with open(run / "metrics.jsonl") as lines:
            return float(json.loads(next(lines))["time"]) - started_s


def bare_s() -> float:
    started_s = time.time()
    return (
        float(run_command(torchrun("benchmarks.contenders.first_step", str(EXAMPLE)))) - started_s
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=11, help="turns of each; an interval needs 6")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    warn_if_busy()
    seconds: dict[str, list[float]] = {"paceline": [], "torchrun": []}
    for number, name, result in take_turns(
        {"paceline": paceline_s, "torchrun": bare_s}, rounds=options.rounds
    ):
        if isinstance(result, ContenderFailed):
            raise SystemExit(f"round {number + 1}: {name} failed: {result}")
        seconds[name].append(result)
        print(f"round {number + 1}: {name} {result:.2f} s", file=sys.stderr)
    time_ratio = ratio(seconds["paceline"], seconds["torchrun"])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    if options.json:
        print(
            json.dumps(
                {
                    "first_step_s": medians,
                    "runs_s": seconds,
                    "ratio": asdict(time_ratio),
                    "interval": "95 %, sign test",
                },
                indent=2,
            )
        )
    else:
        for name, value in medians.items():
            print(f"{name:<10} {value:6.2f} s to the first step")
        print(f"paceline / torchrun, median of pairs [95 % interval, sign test]: {time_ratio}")


if __name__ == "__main__":
    main()
