"""Steps a second of the byte GPT on two CPU ranks of one thread each, beside other tools, in turns.

    python -m benchmarks.throughput [--rounds 7] [--steps 30] [--peers NAME...] [--json]
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

from benchmarks.turns import ContenderFailed, Ratio, paceline, ratio, run_command, take_turns, torchrun, warn_if_busy
from benchmarks.workload import EXAMPLE, LOSSES, RANKS, WARM_UP_STEPS, load_job

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


@dataclass(slots=True)
class Record:
    """All runs of a contender, or why there are none."""

    runs: list[Run] = field(default_factory=list)
    skipped: str | None = None

    @property
    def steps_per_s(self) -> float:
        return statistics.median(run.steps_per_s for run in self.runs)

    @property
    def final_loss(self) -> float:
        return statistics.median(run.final_loss for run in self.runs)


def run_ours(steps: int) -> Run:
    """Through the public command. Its samples_per_s leaves out the first 10 steps, evaluation and saving."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        run = Path(folder) / "run"
        total = str(WARM_UP_STEPS + steps)
        command = paceline("train", str(EXAMPLE), "--plan", f"data={RANKS}", "--steps", total, "--run", str(run))
        summary = json.loads(run_command([*command, "--json"]))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    return Run(summary["samples_per_s"] / load_job().batch, statistics.fmean(losses[-LOSSES:]))


def run_peer(module: str, steps: int) -> Run:
    """As two ranks under torchrun; the result is the last line of stdout."""
    output = run_command(torchrun(module, "--steps", str(steps)))
    return Run(**json.loads(output.strip().splitlines()[-1]))


def measure(*, rounds: int, steps: int, peers: Sequence[str] = tuple(PEERS)) -> dict[str, Record]:
    """Every contender once a round, in the same order; those that are missing or fail are skipped with the reason."""
    records = {name: Record() for name in (OURS, *peers)}
    contenders: dict[str, Callable[[], Run]] = {OURS: partial(run_ours, steps)}
    for name in peers:
        package, module = PEERS[name]
        if importlib.util.find_spec(package) is None:
            records[name].skipped = f"{package} is not installed (pip install '.[bench]')"
        else:
            contenders[name] = partial(run_peer, module, steps)
    for number, name, result in take_turns(contenders, rounds=rounds):
        if isinstance(result, ContenderFailed):
            records[name] = Record(skipped=f"failed in round {number + 1}: {result}")
            print(f"round {number + 1}: {name} failed: {result}", file=sys.stderr)
        else:
            records[name].runs.append(result)
            print(f"round {number + 1}: {name} {result.steps_per_s:.3f} steps/s", file=sys.stderr)
    return records


def compare(records: dict[str, Record]) -> dict[str, Ratio]:
    """Ours by each peer's speed, pair by pair."""
    ours = records[OURS]
    if ours.skipped:
        return {}
    speeds = {name: [run.steps_per_s for run in record.runs] for name, record in records.items()}
    return {name: ratio(speeds[OURS], speeds[name])
            for name, record in records.items() if name != OURS and not record.skipped}


def table(records: dict[str, Record], ratios: dict[str, Ratio]) -> str:
    """The result for people."""
    rows = [f"{'':<16} {'steps/s':>8} {'loss':>7}   {OURS} / peer, median of pairs [95 % interval, sign test]"]
    for name, record in records.items():
        if record.skipped:
            rows.append(f"{name:<16} skipped: {record.skipped}")
        else:
            rows.append(f"{name:<16} {record.steps_per_s:>8.3f} {record.final_loss:>7.3f}   {ratios.get(name, '')}")
    return "\n".join(rows)


def document(records: dict[str, Record], ratios: dict[str, Ratio]) -> dict[str, Any]:
    """The result for programs."""
    return {
        "contenders": {
            name: {"skipped": record.skipped} if record.skipped else
            {"steps_per_s": record.steps_per_s, "final_loss": record.final_loss, "runs": list(map(asdict, record.runs))}
            for name, record in records.items()
        },
        "ratios": {name: asdict(value) for name, value in ratios.items()},
        "interval": "95 %, sign test",
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender; an interval needs 6")
    parser.add_argument("--steps", type=int, default=30, help=f"measured steps, after {WARM_UP_STEPS} of warm-up")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="beside whom; all by default")
    options = parser.parse_args()
    warn_if_busy()
    records = measure(rounds=options.rounds, steps=options.steps, peers=options.peers)
    ratios = compare(records)
    print(json.dumps(document(records, ratios), indent=2) if options.json else table(records, ratios))
    if records[OURS].skipped:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
