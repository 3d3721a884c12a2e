"""How long the ranks of a pipeline idle under each schedule, beside the schedule's own bubble.

Stages are paced: a forward, the gradient of the input and the gradient of the weight each sleep, in place of an
accelerator that computes while the CPU waits. Four ranks can so be measured on two cores.

    python -m benchmarks.bubble [--ranks 4] [--microbatches 8] [--pace-ms 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.strategies.plan import Plan
from paceline.strategies.stages.keys import SCHEDULES
from paceline.strategies.stages.schedule import Action, in_flight, merged, schedule

STEPS = 4
WORK = ("forward", "backward", "input gradients", "weight gradients")
SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def bubble(orders: Sequence[Sequence[Action]], *, num_stages: int) -> float:
    """The part of all ranks' time that a schedule leaves idle if F, I and W take equally long in all stages.

    For GPipe and 1F1B it is (p-1) / (m+p-1) (Huang et al. 2019).
    """
    done: dict[Action, float] = {}
    free = [0.0] * len(orders)
    for rank, action in merged(orders, num_stages=num_stages):
        start = max([free[rank], *(done[needed] for needed in action.needs(num_stages))])
        done[action] = free[rank] = start + SECONDS[action.kind]
    work = sum(SECONDS[action.kind] for order in orders for action in order)
    return 1 - work / (len(orders) * max(free))


@torch.library.custom_op("pace::forward", mutates_args=())
def paced_input(x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return x.clone()


@paced_input.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("pace::weight", mutates_args=())
def paced_weight(weight: Tensor, seconds: float) -> Tensor:
    return weight.clone()


@paced_weight.register_fake
def _(weight: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[1]


def _sleep(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    time.sleep(ctx.seconds)
    return gradient.clone(), None


paced_input.register_autograd(_sleep, setup_context=_keep)
paced_weight.register_autograd(_sleep, setup_context=_keep)


class Paced(nn.Module):
    """A layer whose forward, input gradient and weight gradient take the same time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(4)), seconds

    def forward(self, x: Tensor) -> Tensor:
        return paced_input(x, self.seconds) * paced_weight(self.weight, self.seconds)


def paced_job(layers: int, microbatches: int, seconds: float) -> paceline.Job:
    x = torch.randn(microbatches * (STEPS + 1), 4)
    return paceline.Job(
        model=lambda: nn.Sequential(*(Paced(seconds) for _ in range(layers))),
        data=TensorDataset(x, x),
        loss=lambda output, target: (output - target).square().mean(1).mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
        batch=microbatches,
        steps=STEPS + 1,
    )


def measure(name: str, *, ranks: int, microbatches: int, pace_s: float) -> dict[str, Any]:
    """A run under one schedule: what its trace leaves idle, the median over its steps."""
    virtual = 2 if name == "interleaved" else 1
    layers = 2 * ranks  # every rank holds two, whatever the schedule
    plan = Plan.of(pipeline=ranks, schedule=name, microbatches=microbatches)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        paceline.train(
            paced_job(layers, microbatches, pace_s),
            plan,
            devices=f"cpu:0-{ranks - 1}",
            run=Path(folder) / "run",
            trace=STEPS,
        )
        events = [
            e
            for e in json.loads((Path(folder) / "run" / "trace.json").read_text())["traceEvents"]
            if e["ph"] == "X" and e["cat"] in WORK
        ]
    per_step = len(events) // STEPS // ranks
    by_rank = [
        sorted((e for e in events if e["pid"] == rank), key=lambda e: e["ts"])
        for rank in range(ranks)
    ]
    idle = []
    for step in range(STEPS):
        step_events = [
            e
            for rank_events in by_rank
            for e in rank_events[step * per_step : (step + 1) * per_step]
        ]
        total = max(e["ts"] + e["dur"] for e in step_events) - min(e["ts"] for e in step_events)
        idle.append(1 - sum(e["dur"] for e in step_events) / (total * ranks))
    orders = schedule(name, num_ranks=ranks, num_microbatches=microbatches, virtual=virtual)  # type: ignore[arg-type]
    return {
        "schedule": name,
        "idle": statistics.median(idle),
        "in_flight": max(map(in_flight, orders)),
        "own_bubble": bubble(orders, num_stages=ranks * virtual),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bubble", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--pace-ms", type=float, default=20.0, help="of each layer's forward and of each gradient"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    rows = [
        measure(
            name,
            ranks=options.ranks,
            microbatches=options.microbatches,
            pace_s=options.pace_ms / 1e3,
        )
        for name in SCHEDULES
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{'schedule':<12} {'idle':>7} {'own bubble':>11} {'in flight':>10}   {options.ranks} ranks, "
        f"{options.microbatches} micro-batches"
    )
    for row in rows:
        print(
            f"{row['schedule']:<12} {row['idle']:>6.1%} {row['own_bubble']:>10.1%} {row['in_flight']:>10}"
        )


if __name__ == "__main__":
    main()
