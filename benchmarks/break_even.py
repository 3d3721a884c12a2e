"""When a second device pays: the step of one CPU rank beside that of two replicas, each rank on one core.

A perceptron of six layers of 256 trains under AdamW. With more samples a step it computes longer and sends as much;
with wider layers it computes and sends more.

    OMP_NUM_THREADS=1 python -m benchmarks.break_even [--rounds 6] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from benchmarks.regret.jobs import adamw, numbers
from benchmarks.turns import ratio, take_turns, warn_if_busy

STEPS = 40
LAYERS, CLASSES = 6, 10
WIDTH, SAMPLES = 256, 64  # of the size that both series begin with
MORE_SAMPLES = (64, 256, 1024, 2048)
WIDER = (512, 1024)
COLUMNS = ("series", "width", "samples", "single_ms", "speedup", "low", "high")


def perceptron(width: int) -> nn.Module:
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS))
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def step_s(plan: str, *, width: int, samples: int) -> float:
    """Seconds a step, after the warm-up."""
    torch.manual_seed(0)
    rows = numbers(width, samples=samples)
    job = paceline.Job(
        model=partial(perceptron, width),
        data=TensorDataset(rows.inputs, rows.targets),
        loss=F.cross_entropy,
        optimizer=adamw,
        batch=samples,
        steps=STEPS,
    )
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        figures = paceline.train(job, plan, run=Path(folder) / "run", check=False, table=False)
    return float(figures["step_s"])


def measure(series: str, *, width: int, samples: int, rounds: int) -> dict[str, Any]:
    """A row: how much faster two replicas are, pair by pair."""
    seconds: dict[str, list[float]] = {"single": [], "data=2": []}
    contenders = {plan: partial(step_s, plan, width=width, samples=samples) for plan in seconds}
    for _, plan, result in take_turns(contenders, rounds=rounds):
        if isinstance(result, Exception):
            raise SystemExit(f"{plan}: {result}")
        seconds[plan].append(result)
    speedup = ratio(seconds["single"], seconds["data=2"])
    single_ms = 1e3 * statistics.median(seconds["single"])
    shown = [
        "" if value is None else f"{value:.3f}"
        for value in (speedup.median, speedup.low, speedup.high)
    ]
    print(
        f"{series}: width {width}, {samples} samples: {single_ms:.2f} ms alone, {speedup} times as fast by two",
        file=sys.stderr,
    )
    return dict(zip(COLUMNS, (series, width, samples, f"{single_ms:.2f}", *shown), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.break_even", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=6, help="turns of each; an interval needs 6")
    parser.add_argument("--csv", type=Path, help="where the table is written; by default stdout")
    options = parser.parse_args(arguments)
    if os.environ.get("OMP_NUM_THREADS") != "1":
        raise SystemExit(
            "one rank alone would use both cores: OMP_NUM_THREADS=1 python -m benchmarks.break_even"
        )
    warn_if_busy()
    rows = [
        *(
            measure("more samples", width=WIDTH, samples=samples, rounds=options.rounds)
            for samples in MORE_SAMPLES
        ),
        *(
            measure("wider layers", width=width, samples=SAMPLES, rounds=options.rounds)
            for width in (WIDTH, *WIDER)
        ),
    ]
    with options.csv.open("w", encoding="utf-8", newline="") if options.csv else sys.stdout as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
