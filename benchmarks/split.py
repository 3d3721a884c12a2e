"""What two ways of splitting a model gain on two CPU ranks, each beside the same work split otherwise, in turns.

branches: two equal towers on two parts, beside the same placement with the second tower waiting for the first.
balance: a pipeline of a lopsided model cut by cost, beside one with equally many layers a stage.

    python -m benchmarks.split [--rounds 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from benchmarks.turns import Ratio, ratio, take_turns, warn_if_busy
from paceline.strategies.stages import assignment

STEPS = 25
BRANCHES_BATCH, BALANCE_BATCH = 512, 256
PARTS = '[parts]\n0 = ["left", "out"]\n1 = ["right"]\n'


def tower(width: int, layers: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    )


class TwoTowers(nn.Module):
    """Two towers on the same input; `in_sequence` lets the second wait for the first without changing a value."""

    def __init__(self, in_sequence: bool) -> None:
        super().__init__()
        self.left, self.right, self.out = tower(768, 6), tower(768, 6), nn.Linear(768, 8)
        self.in_sequence = in_sequence

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        right = self.right(x + 0 * left if self.in_sequence else x)
        return self.out(left + right)


def lopsided() -> nn.Module:
    """Four wide layers, then twelve narrow ones, between an entry and a head."""
    wide = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
    narrow = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(12)]
    return nn.Sequential(nn.Linear(768, 512), *wide, *narrow, nn.Linear(512, 8))


def step_s(model: Callable[[], nn.Module], plan: str, *, batch: int) -> float:
    """Seconds a step, after the warm-up."""
    x = torch.randn(2048, 768, generator=torch.Generator().manual_seed(0))
    job = paceline.Job(
        model=model,
        data=TensorDataset(x, x[:, :8].argmax(1)),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
        batch=batch,
        steps=STEPS,
    )
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        return float(
            paceline.train(job, plan, devices="cpu:0-1", run=Path(folder) / "run")["step_s"]
        )


@contextmanager
def equal_layers() -> Iterator[None]:
    """Pipelines are cut as if every layer cost the same."""
    by_cost = assignment.forward_flops
    assignment.forward_flops = lambda piece, **figures: float(bool(piece.parameters))
    try:
        yield
    finally:
        assignment.forward_flops = by_cost


def cut_by_layers() -> float:
    with equal_layers():
        return step_s(lopsided, "pipeline=2 microbatches=8", batch=BALANCE_BATCH)


def compare(
    name: str, candidate: Callable[[], float], other: Callable[[], float], *, rounds: int
) -> tuple[Ratio, Any]:
    """How much faster the candidate is than the other, pair by pair."""
    seconds: dict[str, list[float]] = {"ours": [], "other": []}
    for _, contender, outcome in take_turns({"ours": candidate, "other": other}, rounds=rounds):
        if isinstance(outcome, Exception):
            raise SystemExit(f"{name}: {outcome}")
        seconds[contender].append(outcome)
    return ratio(seconds["other"], seconds["ours"]), {
        k: statistics.median(v) for k, v in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.split", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each; an interval needs 6")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    warn_if_busy()
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(PARTS)
        file.flush()
        placed = f"place={file.name} parts=2"
        comparisons = {
            "branches": compare(
                "branches",
                lambda: step_s(lambda: TwoTowers(False), placed, batch=BRANCHES_BATCH),
                lambda: step_s(lambda: TwoTowers(True), placed, batch=BRANCHES_BATCH),
                rounds=options.rounds,
            ),
            "balance": compare(
                "balance",
                lambda: step_s(lopsided, "pipeline=2 microbatches=8", batch=BALANCE_BATCH),
                cut_by_layers,
                rounds=options.rounds,
            ),
        }
    if options.json:
        document = {
            name: {"ratio": asdict(value), "step_s": seconds}
            for name, (value, seconds) in comparisons.items()
        }
        print(json.dumps(document, indent=2))
        return
    for name, (value, seconds) in comparisons.items():
        print(
            f"{name:<10} {value} (median step {1e3 * seconds['ours']:.1f} ms beside {1e3 * seconds['other']:.1f} ms)"
        )


if __name__ == "__main__":
    main()
