"""Samples a second of training with a parameter server, beside others' on the same small job.

A perceptron of 25 MB in float32 under SGD, 32 samples for each gradient, one server and two workers on this machine.
Asynchronous contenders are compared with Paceline's `staleness=inf`, synchronous ones with `staleness=0`.

    python -m benchmarks.servers [--rounds 7] [--updates 200] [--contenders NAME...] [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contenders.servers.work import BATCH, LOSSES, WARM_UP_UPDATES
from benchmarks.turns import ROOT, ContenderFailed, Ratio, paceline, ratio, run_command, take_turns, warn_if_busy

WORKERS = 2
JOB = ROOT / "benchmarks" / "contenders" / "servers" / "perceptron.py"


@dataclass(frozen=True, slots=True)
class Run:
    """What one contender did in one turn. final_loss: the mean of the last losses."""

    samples_per_s: float
    final_loss: float


@dataclass(frozen=True, slots=True)
class Ours:
    """Paceline through its command. Its samples_per_s leaves out the first 10 updates and saving."""

    plan: str
    batch: int
    package: str = "paceline"
    beside: str | None = None

    def run(self, updates: int) -> Run:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            run = Path(folder) / "run"
            command = paceline("train", str(JOB), "--plan", self.plan, "--set", f"batch={self.batch}",
                               "--set", f"steps={WARM_UP_UPDATES + updates}", "--run", str(run), "--json")
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
        command = [sys.executable, "-m", f"benchmarks.contenders.servers.{module}", *arguments,
                   "--updates", str(updates), "--workers", str(WORKERS)]
        return Run(**json.loads(run_command(command).strip().splitlines()[-1]))


ASYNCHRONOUS, SYNCHRONOUS = "paceline", "paceline, synchronous"
CONTENDERS: dict[str, Ours | Peer] = {
    ASYNCHRONOUS: Ours(f"server=1 workers={WORKERS} staleness=inf", BATCH),
    "torch rpc": Peer("torch", ("with_rpc",), ASYNCHRONOUS),
    "tensorflow": Peer("tensorflow", ("with_tensorflow",), ASYNCHRONOUS),
    SYNCHRONOUS: Ours(f"server=1 workers={WORKERS}", WORKERS * BATCH),
    "torch rpc, synchronous": Peer("torch", ("with_rpc", "--synchronous"), SYNCHRONOUS),
}


@dataclass(slots=True)
class Record:
    """All runs of a contender, or why there are none."""

    runs: list[Run] = field(default_factory=list)
    skipped: str | None = None

    @property
    def samples_per_s(self) -> float:
        return statistics.median(run.samples_per_s for run in self.runs)

    @property
    def final_loss(self) -> float:
        return statistics.median(run.final_loss for run in self.runs)


def measure(*, rounds: int, updates: int, names: Sequence[str] = tuple(CONTENDERS)) -> dict[str, Record]:
    """Every contender once a round, in the same order; those that are missing or fail are skipped with the reason."""
    records = {name: Record() for name in names}
    contenders: dict[str, Callable[[], Run]] = {}
    for name in names:
        package = CONTENDERS[name].package
        if importlib.util.find_spec(package) is None:
            records[name].skipped = f"{package} is not installed (pip install '.[bench]')"
        else:
            contenders[name] = partial(CONTENDERS[name].run, updates)
    for number, name, result in take_turns(contenders, rounds=rounds):
        if isinstance(result, ContenderFailed):
            records[name] = Record(skipped=f"failed in round {number + 1}: {result}")
            print(f"round {number + 1}: {name} failed: {result}", file=sys.stderr)
        else:
            records[name].runs.append(result)
            print(f"round {number + 1}: {name} {result.samples_per_s:.0f} samples/s", file=sys.stderr)
    return records


def compare(records: dict[str, Record]) -> dict[str, Ratio]:
    """Ours by each peer's speed, pair by pair."""
    speeds = {name: [run.samples_per_s for run in record.runs] for name, record in records.items()
              if not record.skipped}
    pairs = {name: CONTENDERS[name].beside for name in speeds}
    return {name: ratio(speeds[ours], speeds[name]) for name, ours in pairs.items() if ours in speeds}


def table(records: dict[str, Record], ratios: dict[str, Ratio]) -> str:
    """The result for people."""
    rows = [f"{'':<22} {'samples/s':>9} {'loss':>7}   paceline / peer, median of pairs [95 % interval, sign test]"]
    for name, record in records.items():
        if record.skipped:
            rows.append(f"{name:<22} skipped: {record.skipped}")
        else:
            rows.append(f"{name:<22} {record.samples_per_s:>9.0f} {record.final_loss:>7.3f}   {ratios.get(name, '')}")
    return "\n".join(rows)


def document(records: dict[str, Record], ratios: dict[str, Ratio]) -> dict[str, Any]:
    """The result for programs."""
    return {
        "contenders": {
            name: {"skipped": record.skipped} if record.skipped else
            {"samples_per_s": record.samples_per_s, "final_loss": record.final_loss,
             "runs": list(map(asdict, record.runs))}
            for name, record in records.items()
        },
        "ratios": {name: asdict(value) for name, value in ratios.items()},
        "interval": "95 %, sign test",
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender; an interval needs 6")
    parser.add_argument("--updates", type=int, default=200, help=f"measured, after {WARM_UP_UPDATES} of warm-up")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS),
                        help="which; all by default")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    warn_if_busy()
    records = measure(rounds=options.rounds, updates=options.updates, names=options.contenders)
    ratios = compare(records)
    print(json.dumps(document(records, ratios), indent=2) if options.json else table(records, ratios))
    if any(record.skipped for name, record in records.items() if isinstance(CONTENDERS[name], Ours)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
