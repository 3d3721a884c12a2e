"""What it costs that a run can survive: copies and notes in memory, the journal, comparing replicas, and the watch.

    python -m benchmarks.overhead [--pairs 30] [--jobs NAME...] [--plans PLAN...] [--json]

All of it is on for a block of steps and off for the next, or the other way round, in one run: neighbours in time are
compared. A step's time is that between the ends of steps, so it has in it what happens between them. The jobs: `blocks`
has steps of some 10 ms, the byte GPT of some 500 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.turns import ROOT, ratio, run_command, warn_if_busy

JOBS: dict[str, tuple[Path, int, int]] = {  # by name: the file, steps before the first block, and of a block
    "blocks": (ROOT / "benchmarks" / "contenders" / "recovery" / "blocks.py", 400, 200),
    "gpt": (ROOT / "examples" / "02_gpt_bytes.py", 16, 6),
}
PLANS = ("single", "data=2")


def blocks_s(job: str, plan: str, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of each block with it, and of the one beside it without."""
    file, warm_up, block = JOBS[job]
    output = run_command([sys.executable, "-m", "benchmarks.contenders.overhead.run", str(file), plan,
                          *map(str, (warm_up, block, pairs))])
    figures = json.loads(output.splitlines()[-1])
    return figures["with_s"], figures["without_s"]


def main(pairs: int, jobs: Sequence[str], plans: Sequence[str], *, as_json: bool) -> None:
    warn_if_busy()
    cases = {f"{job} {plan}": blocks_s(job, plan, pairs) for job in jobs for plan in plans}
    ratios = {case: ratio(without_s, with_s) for case, (with_s, without_s) in cases.items()}
    if as_json:
        print(json.dumps({"with_s, without_s": cases,
                          "throughput": {case: asdict(each) for case, each in ratios.items()}}))
        return
    print(f"{'':20} ms a step: with, without   throughput with / without: median of pairs   all together")
    for case, (with_s, without_s) in cases.items():
        block = JOBS[case.partition(" ")[0]][2]
        with_ms, without_ms = (1e3 * statistics.median(each) / block for each in (with_s, without_s))
        together = sum(without_s) / sum(with_s)
        print(f"{case:20} {with_ms:15.3f}  {without_ms:7.3f}   {ratios[case]!s:37}   {together:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--jobs", nargs="+", default=tuple(JOBS), choices=tuple(JOBS))
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(sys.argv[1:])
    main(asked.pairs, asked.jobs, asked.plans, as_json=asked.json)
