"""Each part of a step on CPU ranks with its microseconds, on rank 0.

    python -m benchmarks.host.parts [--job 2ms] [--plans single data=2] [--steps 1000] [--json]

The jobs are those of `benchmarks.small_steps`. A part's time is the median over steps, without the parts in it. Timers
take about half a microsecond for each call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

import torch

import paceline as pl
from benchmarks.small_steps import SMALL_JOBS
from benchmarks.turns import warn_if_busy
from benchmarks.workload import JOBS, WARM_UP_STEPS
from paceline.job.order import Order
from paceline.launch.collectives.barrier import SharedBarrier
from paceline.strategies.data.reduce import Uncompressed
from paceline.strategies.data.run import GradientBuckets
from paceline.training import feed, window
from paceline.training.feed import MicroBatch
from paceline.training.loop import Loop
from paceline.training.parts.copies import Copies
from paceline.training.parts.drift import Comparisons
from paceline.training.parts.step_log import StepLog
from paceline.training.prefetch import Prefetch
from paceline.training.rank_state import RankState
from paceline.training.step import TrainingStep
from paceline.training.stepper import Stepper
from paceline.training.window import WindowWork

# What is called for a part, in the order of a step. Python finds each under this name when it is called.
PARTS: dict[str, list[tuple[Any, str]]] = {
    "order of samples": [(Order, "indices"), (Order, "window"), (feed.DataShard, "cuts")],
    "rows of the batch": [(feed, "fetch")],
    "digest of samples": [(feed, "digest")],
    "rest of the feed": [(Prefetch, "next")],
    "figures before forwards": [(RankState, "before_forwards")],
    "random streams": [(window, "seed_streams")],
    "forward": [(MicroBatch, "call")],
    "loss": [(WindowWork, "loss")],
    "backward": [(torch.Tensor, "backward")],
    "gradients to buckets": [(GradientBuckets, "begin"), (GradientBuckets, "_arrived")],
    "sum of gradients": [(Uncompressed, "finish"), (GradientBuckets, "finish")],
    "waiting for other ranks": [(SharedBarrier, "wait")],
    "rest of the backward": [(TrainingStep, "backward")],
    "agreement of ranks": [(TrainingStep, "_ask")],
    "rest of the agreement": [(TrainingStep, "agree")],
    "update": [(RankState, "update")],
    "rest of the step": [(Stepper, "step")],
    "metrics and journal": [(StepLog, "stepped")],
    "copies in memory": [(Copies, "settled")],
    "comparisons": [(Comparisons, "settled")],
}
REST = "rest of the loop"


class Clock:
    """Adds up the seconds of parts, each without those that run in it."""

    def __init__(self) -> None:
        self.inner_s: list[float] = []  # of each part that runs, those in it
        self.now, self.steps = Counter[str](), list[Counter[str]]()
        self.ended_s = 0.0

    def time(self, owner: Any, name: str, part: str) -> None:
        whole = getattr(owner, name)

        @wraps(whole)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.inner_s.append(0.0)
            began_s = time.perf_counter()
            try:
                return whole(*args, **kwargs)
            finally:
                took_s = time.perf_counter() - began_s
                self.now[part] += took_s - self.inner_s.pop()
                if self.inner_s:
                    self.inner_s[-1] += took_s

        setattr(owner, name, timed)

    def end_step(self) -> None:
        ended_s = time.perf_counter()
        self.now[REST] = ended_s - self.ended_s - sum(self.now.values())
        self.steps.append(self.now)
        self.now, self.ended_s = Counter(), ended_s


def watch(steps: int) -> None:
    """Let every run of this process and its forks write the parts of its steps to its folder."""
    clock, count = Clock(), Loop.count
    for part, functions in PARTS.items():
        for owner, name in functions:
            clock.time(owner, name, part)

    def counting(loop: Loop, *args: Any, **kwargs: Any) -> None:
        count(loop, *args, **kwargs)
        clock.end_step()
        if loop.run.context.rank == 0 and len(clock.steps) == WARM_UP_STEPS + steps:
            measured = json.dumps(clock.steps[WARM_UP_STEPS:])
            (loop.run.log.metrics or Path()).with_name("parts.json").write_text(measured)

    Loop.count = counting  # type: ignore[method-assign]


def parts_us(job: str, plan: str, steps: int) -> dict[str, float]:
    """The medians of the parts of a step, and of the whole."""
    file, settings = JOBS[job]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as made:
        run = Path(made) / "run"
        # What comes after a step counts to it, so one more is taken.
        options: Any = {"steps": WARM_UP_STEPS + steps + 1, "check": False, "table": False}
        pl.train(pl.load(str(file), settings), plan, run=run, **options)
        taken = json.loads((run / "parts.json").read_text())
    medians = {
        part: 1e6 * statistics.median(step.get(part, 0.0) for step in taken)
        for part in (*PARTS, REST)
    }
    return medians | {"step": 1e6 * statistics.median(sum(step.values()) for step in taken)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host.parts", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--job", choices=SMALL_JOBS, default=SMALL_JOBS[0])
    parser.add_argument("--plans", nargs="+", default=["single", "data=2"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    warn_if_busy()
    watch(options.steps)
    measured = {plan: parts_us(options.job, plan, options.steps) for plan in options.plans}
    if options.json:
        print(json.dumps(measured, indent=2))
        return
    print(f"{'us of a step':<24}" + "".join(f"{plan:>10}" for plan in measured))
    for part in (*PARTS, REST, "step"):
        print(f"{part:<24}" + "".join(f"{times[part]:>10.0f}" for times in measured.values()))


if __name__ == "__main__":
    main()
