"""Steps a second of the byte GPT on two CPU ranks of one thread each, beside other tools, in turns.

python -m benchmarks.throughput [--rounds 7] [--steps 30] [--peers NAME...] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.turns import (
    Ratio,
    Record,
    document,
    measure,
    paceline,
    ratio,
    run_command,
    torchrun,
    warn_if_busy,
)
from benchmarks.workload import JOBS, LOSSES, RANKS, WARM_UP_STEPS

OURS = "paceline"
# The package that each needs, and the module that runs it.
PEERS = {
    "handwritten DDP": ("torch", "benchmarks.contenders.handwritten"),
    "accelerate": ("accelerate", "benchmarks.contenders.with_accelerate"),
    "lightning": ("lightning", "benchmarks.contenders.with_lightning"),
    "deepspeed": ("deepspeed", "benchmarks.contenders.with_deepspeed"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """What one contender did in one round. final_loss: the mean of the last losses, over all ranks."""

    steps_per_s: float
    final_loss: float


def run_ours(steps: int, job: str = "gpt", plan: str = f"data={RANKS}") -> Run:
    """Through the public command. Steps are timed from line to line of its metrics, with all that is between them."""
    file, settings = JOBS[job]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        run, total = Path(folder) / "run", str(WARM_UP_STEPS + steps)
        command = paceline("train", str(file), "--plan", plan, "--steps", total, "--run", str(run))
        run_command(
            [*command, *(f"--set={name}={value}" for name, value in settings.items()), "--json"]
        )
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in lines if "loss" in line]
    duration_s = taken[-1]["time"] - taken[WARM_UP_STEPS - 1]["time"]
    return Run(steps / duration_s, statistics.fmean(line["loss"] for line in taken[-LOSSES:]))


def run_peer(module: str, *arguments: str) -> Run:
    """As two ranks under torchrun; the result is the last line of stdout."""
    output = run_command(torchrun(module, *arguments))
    return Run(**json.loads(output.strip().splitlines()[-1]))


def contenders(steps: int, peers: Sequence[str]) -> dict[str, tuple[str, Callable[[], Run]]]:
    """Ours first."""
    return {
        OURS: (OURS, partial(run_ours, steps)),
        **{
            name: (PEERS[name][0], partial(run_peer, PEERS[name][1], "--steps", str(steps)))
            for name in peers
        },
    }


def compare(records: Mapping[str, Record[Run]], ours: str = OURS) -> dict[str, Ratio]:
    """The speed of one of ours by that of each other contender, pair by pair."""
    if records[ours].skipped:
        return {}
    return {
        name: ratio(records[ours].all("steps_per_s"), record.all("steps_per_s"))
        for name, record in records.items()
        if name != ours and not record.skipped
    }


def table(records: Mapping[str, Record[Run]], ratios: Mapping[str, Ratio]) -> str:
    """The result for people."""
    rows = [
        f"{'':<16} {'steps/s':>8} {'loss':>7}   {OURS} / peer, median of pairs [95 % interval, sign test]"
    ]
    for name, record in records.items():
        if record.skipped:
            rows.append(f"{name:<16} skipped: {record.skipped}")
        else:
            rows.append(
                f"{name:<16} {record.median('steps_per_s'):>8.3f} {record.median('final_loss'):>7.3f}   "
                f"{ratios.get(name, '')}"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="turns of each contender; an interval needs 6"
    )
    parser.add_argument(
        "--steps", type=int, default=30, help=f"measured steps, after {WARM_UP_STEPS} of warm-up"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, default=list(PEERS), help="beside whom; all by default"
    )
    options = parser.parse_args()
    warn_if_busy()
    records = measure(
        contenders(options.steps, options.peers),
        rounds=options.rounds,
        say=lambda run: f"{run.steps_per_s:.3f} steps/s",
    )
    ratios = compare(records)
    print(
        json.dumps(document(records, ratios), indent=2) if options.json else table(records, ratios)
    )
    if records[OURS].skipped:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
