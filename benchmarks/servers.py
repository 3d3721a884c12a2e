"""Samples a second of training with a parameter server, beside others' on the same small job.

A perceptron of 25 MB in float32 under SGD, 32 samples for each gradient, one server and two workers on this machine.
Asynchronous contenders are compared with Paceline's `staleness=inf`, synchronous ones with `staleness=0`.

    python -m benchmarks.servers [--rounds 7] [--updates 200] [--contenders NAME...] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.contenders.servers.work import BATCH, LOSSES, LR, WARM_UP_UPDATES
from benchmarks.turns import (
    ROOT,
    Ratio,
    Record,
    document,
    measure,
    paceline,
    ratio,
    run_command,
    warn_if_busy,
)

WORKERS = 2
JOB = ROOT / "benchmarks" / "contenders" / "servers" / "perceptron.py"


@dataclass(frozen=True, slots=True)
class Run:
    """What one contender did in one turn. final_loss: the mean of the last losses."""

    samples_per_s: float
    final_loss: float


@dataclass(frozen=True, slots=True)
class Ours:
    """Paceline through its command. Its samples_per_s leaves out the first 10 updates and saving.

    An update of one worker's gradient is scaled by its part of the step's batch, so the learning rate is as many times
    the others'.
    """

    plan: str
    updates_a_step: int
    package: str = "paceline"
    beside: str | None = None

    def run(self, updates: int) -> Run:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            run = Path(folder) / "run"
            steps = WARM_UP_UPDATES + updates // self.updates_a_step
            command = paceline(
                "train",
                str(JOB),
                "--plan",
                self.plan,
                "--set",
                f"batch={WORKERS * BATCH}",
                "--set",
                f"steps={steps}",
                "--set",
                f"lr={LR * self.updates_a_step}",
                "--run",
                str(run),
                "--json",
            )
            summary = json.loads(run_command(command))
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        return Run(summary["samples_per_s"], statistics.fmean(losses[-LOSSES:]))


@dataclass(frozen=True, slots=True)
class Peer:
    """Another's. package: what it needs. beside: which of ours does what it does."""

    package: str
    command: tuple[str, ...]
    beside: str

    def run(self, updates: int) -> Run:
        module, *arguments = self.command
        command = [
            sys.executable,
            "-m",
            f"benchmarks.contenders.servers.{module}",
            *arguments,
            "--updates",
            str(updates),
            "--workers",
            str(WORKERS),
        ]
        return Run(**json.loads(run_command(command).strip().splitlines()[-1]))


ASYNCHRONOUS, SYNCHRONOUS = "paceline", "paceline, synchronous"
CONTENDERS: dict[str, Ours | Peer] = {
    ASYNCHRONOUS: Ours(f"servers=1 workers={WORKERS} staleness=inf", WORKERS),
    "torch rpc": Peer("torch", ("with_rpc",), ASYNCHRONOUS),
    "tensorflow": Peer("tensorflow", ("with_tensorflow",), ASYNCHRONOUS),
    SYNCHRONOUS: Ours(f"servers=1 workers={WORKERS}", 1),
    "torch rpc, synchronous": Peer("torch", ("with_rpc", "--synchronous"), SYNCHRONOUS),
}


def compare(records: Mapping[str, Record[Run]]) -> dict[str, Ratio]:
    """Ours by each peer's speed, pair by pair."""
    speeds = {
        name: record.all("samples_per_s") for name, record in records.items() if not record.skipped
    }
    pairs = {name: CONTENDERS[name].beside for name in speeds}
    return {
        name: ratio(speeds[contender], speeds[name])
        for name, contender in pairs.items()
        if contender in speeds
    }


def table(records: Mapping[str, Record[Run]], ratios: Mapping[str, Ratio]) -> str:
    """The result for people."""
    rows = [
        f"{'':<22} {'samples/s':>9} {'loss':>7}   paceline / peer, median of pairs [95 % interval, sign test]"
    ]
    for name, record in records.items():
        if record.skipped:
            rows.append(f"{name:<22} skipped: {record.skipped}")
        else:
            rows.append(
                f"{name:<22} {record.median('samples_per_s'):>9.0f} {record.median('final_loss'):>7.3f}   "
                f"{ratios.get(name, '')}"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.servers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="turns of each contender; an interval needs 6"
    )
    parser.add_argument(
        "--updates", type=int, default=200, help=f"measured, after {WARM_UP_UPDATES} of warm-up"
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=list(CONTENDERS),
        help="which; all by default",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    warn_if_busy()
    records = measure(
        {
            name: (CONTENDERS[name].package, partial(CONTENDERS[name].run, options.updates))
            for name in options.contenders
        },
        rounds=options.rounds,
        say=lambda run: f"{run.samples_per_s:.0f} samples/s",
    )
    ratios = compare(records)
    print(
        json.dumps(document(records, ratios), indent=2) if options.json else table(records, ratios)
    )
    if any(
        record.skipped for name, record in records.items() if isinstance(CONTENDERS[name], Ours)
    ):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
