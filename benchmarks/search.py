"""Trials an hour beside Optuna with a process a trial and Ray Tune; and how soon a search equals random search.

    python -m benchmarks.search rate [--rounds 3] [--trials 16] [--json]
    python -m benchmarks.search sooner [--seeds 5] [--trials 60] [--json]

`rate`: the same trials of `examples/05_search.py`, which differ only in the learning rate, on two CPU processes, in
turns. The time is that of the whole command, with its start and its figures. `sooner`: the whole space. Random search
without pruning uses its whole budget; then TPE with the median's pruning is timed until it reaches the same validation
loss.
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
from typing import Any

from benchmarks.turns import (
    ROOT,
    ContenderFailed,
    paceline,
    ratio,
    run_command,
    take_turns,
    warn_if_busy,
)

EXAMPLE = ROOT / "examples" / "05_search.py"
PROCESSES = 2
FIXED = ("width=16", "depth=2", "activation=relu", "batch=32", "net.pool=max")


def search(*words: str) -> dict[str, Any]:
    """study.json of a search on the example."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        run = Path(folder) / "run"
        run_command(
            paceline("search", str(EXAMPLE), "--procs", str(PROCESSES), "--run", str(run), *words)
        )
        study: dict[str, Any] = json.loads((run / "study.json").read_text())
        return study


def paceline_s(trials: int) -> float:
    began_s = time.perf_counter()
    study = search(
        "--trials",
        str(trials),
        "--sampler",
        "random",
        "--pruner",
        "none",
        *(word for setting in FIXED for word in ("--set", setting)),
    )
    assert all(trial["state"] == "complete" for trial in study["trials"])
    return time.perf_counter() - began_s


def peer_s(kind: str, trials: int) -> float:
    out = run_command(
        [
            sys.executable,
            "-m",
            "benchmarks.contenders.search_trials",
            kind,
            str(trials),
            str(PROCESSES),
        ]
    )
    return float(json.loads(out.splitlines()[-1])["seconds"])


def rate(rounds: int, trials: int) -> dict[str, Any]:
    """Seconds of the same number of trials, in turns."""
    seconds: dict[str, list[float]] = {"paceline": [], "optuna": [], "ray": []}
    contenders = {
        "paceline": lambda: paceline_s(trials),
        "optuna": lambda: peer_s("optuna", trials),
        "ray": lambda: peer_s("ray", trials),
    }
    for number, name, result in take_turns(contenders, rounds=rounds):
        if isinstance(result, ContenderFailed):
            raise SystemExit(f"round {number + 1}: {name} failed: {result}")
        seconds[name].append(result)
        print(f"round {number + 1}: {name} {result:.1f} s", file=sys.stderr)
    return {
        "trials": trials,
        "seconds": seconds,
        "trials_per_hour": {
            name: 3600 * trials / statistics.median(each) for name, each in seconds.items()
        },
        "times_as_many": {
            name: asdict(ratio(each, seconds["paceline"]))
            for name, each in seconds.items()
            if name != "paceline"
        },
    }


def sooner(seeds: int, trials: int) -> dict[str, Any]:
    """Per seed: when random search had used its budget, and when the search was as good."""
    rows = []
    for seed in range(seeds):
        words = ("--trials", str(trials), "--seed", str(seed))
        plain = search(*words, "--sampler", "random", "--pruner", "none")
        searched = search(*words)
        target, budget_s = (
            plain["best"]["value"],
            max(trial["ended_s"] for trial in plain["trials"]),
        )
        reached = [
            trial["ended_s"]
            for trial in searched["trials"]
            if trial["state"] == "complete" and trial["value"] <= target
        ]
        rows.append(
            {
                "seed": seed,
                "target": target,
                "random_s": budget_s,
                "reached_s": min(reached, default=None),
                "best": searched["best"]["value"],
                "ours_s": max(trial["ended_s"] for trial in searched["trials"]),
                "test_accuracy": searched["test"]["accuracy"],
                "random_test_accuracy": plain["test"]["accuracy"],
            }
        )
        print(rows[-1], file=sys.stderr)
    times = [
        row["random_s"] / row["reached_s"] if row["reached_s"] else 0.0 for row in rows
    ]  # 0: not at all
    return {"seeds": rows, "times_sooner": times, "median": statistics.median(times)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("what", choices=["rate", "sooner"])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each; an interval needs 6")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int)
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    warn_if_busy()
    comparison = (
        rate(options.rounds, options.trials or 16)
        if options.what == "rate"
        else sooner(options.seeds, options.trials or 60)
    )
    if options.json:
        print(json.dumps(comparison, indent=2))
    elif options.what == "rate":
        for name, value in comparison["trials_per_hour"].items():
            print(f"{name:<10} {value:8,.0f} trials an hour")
    else:
        print(
            f"random search's best of {options.trials or 60} trials: "
            f"{comparison['median']:.2f} times sooner (median)"
        )


if __name__ == "__main__":
    main()
