"""What it costs that a run can survive: copies in memory, the journal, comparing replicas, and the watch.

    python -m benchmarks.overhead [--pairs N] [--jobs NAME...] [--plans PLAN...] [--json]

All of it is on for a block of steps and off for the next, or the other way round, in one run: neighbours in time are
compared. Blocks are short, so that a machine that becomes slower for some seconds delays both blocks of a pair. Copies
are made in some blocks only: the median of pairs is what the rest costs, and all pairs together have copies too. A
step's time is that between the ends of steps, so it has in it what happens between them. The jobs: `blocks` has steps
of some 10 ms, the byte GPT of some 500 ms.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.turns import CONFIDENCE, ROOT, Ratio, ratio, run_command, warn_if_busy

JOBS: dict[
    str, tuple[Path, int, int, int]
] = {  # by name: the file, steps before the first block, of a block; pairs
    "blocks": (ROOT / "benchmarks" / "contenders" / "recovery" / "blocks.py", 400, 10, 1000),
    "gpt": (ROOT / "examples" / "02_gpt_bytes.py", 16, 2, 60),
}
PLANS = ("single", "data=2")
RESAMPLES = 2000


def blocks_s(job: str, plan: str, pairs: int | None) -> tuple[list[float], list[float]]:
    """Seconds of each block with it, and of the one beside it without."""
    file, warm_up, block, usual_pairs = JOBS[job]
    output = run_command(
        [
            sys.executable,
            "-m",
            "benchmarks.contenders.overhead.run",
            str(file),
            plan,
            *map(str, (warm_up, block, pairs or usual_pairs)),
        ]
    )
    figures = json.loads(output.splitlines()[-1])
    return figures["with_s"], figures["without_s"]


def together(without_s: Sequence[float], with_s: Sequence[float]) -> Ratio:
    """The sums' ratio, with the 95 % interval of a bootstrap over pairs."""
    draw, pairs = random.Random(0), list(zip(without_s, with_s, strict=True))
    resampled = sorted(_total_ratio(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    outside = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Ratio(_total_ratio(pairs), resampled[outside], resampled[-1 - outside])


def _total_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(a for a, _ in pairs) / sum(b for _, b in pairs)


def main(pairs: int | None, jobs: Sequence[str], plans: Sequence[str], *, as_json: bool) -> None:
    warn_if_busy()
    cases = {f"{job} {plan}": blocks_s(job, plan, pairs) for job in jobs for plan in plans}
    if as_json:
        print(json.dumps({"with_s, without_s": cases}))
        return
    print(
        f"{'':20} ms a step: with, without   throughput with / without: median of pairs   all together"
    )
    for case, (with_s, without_s) in cases.items():
        block = JOBS[case.partition(" ")[0]][2]
        with_ms, without_ms = (
            1e3 * statistics.median(each) / block for each in (with_s, without_s)
        )
        print(
            f"{case:20} {with_ms:15.3f}  {without_ms:7.3f}   {ratio(without_s, with_s)!s:37}   "
            f"{together(without_s, with_s)}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=None)
    parser.add_argument("--jobs", nargs="+", default=tuple(JOBS), choices=tuple(JOBS))
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(sys.argv[1:])
    main(options.pairs, options.jobs, options.plans, as_json=options.json)
