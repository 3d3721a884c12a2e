"""What it costs that a run can survive: copies in memory, the journal, comparing replicas, and the watch over ranks.

    python -m benchmarks.overhead [--rounds 9] [--jobs NAME...] [--plans PLAN...] [--json]

Runs with all of it and runs without any of it take turns. A step's time is that between the ends of steps, so it has
in it what happens between them. The jobs: `blocks` has steps of some 10 ms, the byte GPT of some 500 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.turns import ROOT, ContenderFailed, ratio, run_command, take_turns, warn_if_busy

JOBS: dict[str, tuple[Path, int]] = {  # by name: the file, and so many steps
    "blocks": (ROOT / "benchmarks" / "contenders" / "recovery" / "blocks.py", 500),
    "gpt": (ROOT / "examples" / "02_gpt_bytes.py", 15),
}
PLANS = ("single", "data=2")
HOW = ("with", "without")


def step_s(job: str, plan: str, how: str) -> float:
    """Seconds a step, of one run."""
    file, steps = JOBS[job]
    output = run_command([sys.executable, "-m", "benchmarks.contenders.overhead.run", str(file), plan, str(steps), how])
    return float(json.loads(output.splitlines()[-1])["step_s"])


def main(rounds: int, jobs: Sequence[str], plans: Sequence[str], *, as_json: bool) -> None:
    warn_if_busy()
    cases = {f"{job} {plan}": (job, plan) for job in jobs for plan in plans}
    turns = {f"{case} {how}": partial(step_s, job, plan, how) for case, (job, plan) in cases.items() for how in HOW}
    times_s: dict[str, list[float]] = {name: [] for name in turns}
    for number, name, result in take_turns(turns, rounds=rounds):
        if isinstance(result, ContenderFailed):
            raise SystemExit(f"round {number + 1}: {name} failed: {result}")
        times_s[name].append(result)
        print(f"round {number + 1}: {name} {1e3 * result:.3f} ms a step", file=sys.stderr)
    ratios = {case: ratio(times_s[f"{case} without"], times_s[f"{case} with"]) for case in cases}
    if as_json:
        print(json.dumps({"step_s": times_s, "throughput": {case: asdict(each) for case, each in ratios.items()}}))
        return
    print(f"{'':20} ms a step: with, without   throughput with / without")
    for case, each in ratios.items():
        with_s, without_s = (statistics.median(times_s[f"{case} {how}"]) for how in HOW)
        print(f"{case:20} {1e3 * with_s:15.3f}  {1e3 * without_s:7.3f}   {each}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jobs", nargs="+", default=tuple(JOBS), choices=tuple(JOBS))
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(sys.argv[1:])
    main(asked.rounds, asked.jobs, asked.plans, as_json=asked.json)
