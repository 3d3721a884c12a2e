"""What it costs in loss to synchronise less often, in fewer bytes or without waiting, beside the synchronous way.

All ways train the same job from the same seed on equally many samples with equal settings, on ranks of this machine. No
way was tuned, with one exception: an asynchronous way may leave out momentum, because asynchrony adds momentum.

    python -m benchmarks.quality [--job gpt|digits] [--workers 4] [--ways NAME...] [--set NAME=VALUE...] [--json FILE]
                                 [--synchronous-first STEPS]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.turns import ROOT, ContenderFailed, paceline, run_command

TIMEOUT_S = 3600.0
LAST = 50  # steps whose mean loss is the training loss: one batch's is noise
SYNCHRONOUS = "synchronous"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is trained. settings: the file's own, changed so that two cores can train it often."""

    file: str
    settings: Mapping[str, Any]


# 0.6 million parameters; 1500 steps of 32 windows see 3 MB of the standard library's 9 once.
SUBJECTS = {
    "gpt": Subject("02_gpt_bytes.py", {"width": 128, "layers": 3, "sequence": 64, "steps": 1500}),
    "digits": Subject("01_digits.py", {"epochs": 20}),
}


@dataclass(frozen=True, slots=True)
class Way:
    """plan: for n workers. settings: its own."""

    plan: str
    settings: Mapping[str, str] = field(default_factory=dict)


_SERVERS = "servers=2 workers={n} colocate=yes"
WAYS = {
    SYNCHRONOUS: Way("data={n}"),
    "bf16": Way("data={n} compress=bf16"),
    "int8": Way("data={n} compress=int8"),
    "top-k": Way("data={n} compress=topk"),
    "PowerSGD": Way("data={n} compress=powersgd"),
    "local SGD H=10": Way("data={n} local=10"),
    "DiLoCo H=10": Way("data={n} local=10 outer=diloco"),
    "DiLoCo H=100": Way("data={n} local=100 outer=diloco"),
    "DiLoCo H=100 int8": Way("data={n} local=100 outer=diloco compress=int8"),
    "DiLoCo H=100 int8, 4 fragments": Way(
        "data={n} local=100 outer=diloco fragments=4 compress=int8"
    ),
    "staleness=1": Way(f"{_SERVERS} staleness=1"),
    "staleness=inf": Way(f"{_SERVERS} staleness=inf"),
    "staleness=inf, damped": Way(f"{_SERVERS} staleness=inf damping=inverse"),
    "staleness=inf, no momentum": Way(f"{_SERVERS} staleness=inf", {"momentum": "0"}),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """sent_bytes: by a rank, on average. accuracy: None where the job has none."""

    way: str
    training_loss: float
    validation_loss: float
    accuracy: float | None
    sent_bytes: float
    wall_s: float


def run(
    way: str,
    subject: Subject,
    settings: Mapping[str, str],
    *,
    workers: int,
    synchronous_first: int = 0,
) -> Measurement:
    """Train once; so many steps first as the synchronous way does.

    Raises:
        ContenderFailed: the run failed.
    """
    given = {**subject.settings, **settings, **WAYS[way].settings}
    with tempfile.TemporaryDirectory(prefix="paceline-quality-") as folder:
        command = paceline(
            "train",
            str(ROOT / "examples" / subject.file),
            "--run",
            f"{folder}/run",
            "--devices",
            f"cpu:0-{workers - 1}",
            "--timeout",
            f"{TIMEOUT_S:g}",
            *(word for name, value in given.items() for word in ("--set", f"{name}={value}")),
        )
        if synchronous_first:
            run_command(
                [
                    *command,
                    "--plan",
                    WAYS[SYNCHRONOUS].plan.format(n=workers),
                    "--steps",
                    str(synchronous_first),
                ],
                timeout_s=TIMEOUT_S,
            )
            command.append("--resume")
        run_command([*command, "--plan", WAYS[way].plan.format(n=workers)], timeout_s=TIMEOUT_S)
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if "loss" in line]
    return Measurement(
        way,
        statistics.fmean(losses[-LAST:]),
        summary["validation_loss"],
        summary["metrics"].get("accuracy"),
        _sent_bytes(summary),
        summary["wall_s"],
    )


def _sent_bytes(summary: Mapping[str, Any]) -> float:
    """By a rank on average; what servers send is what workers pull."""
    if "workers" not in summary:
        return float(summary["bytes_sent"])
    return (
        sum(
            worker["pushed_bytes"] + worker["pulled_bytes"]
            for worker in summary["workers"].values()
        )
        / summary["world_size"]
    )


def table(results: Sequence[Measurement]) -> str:
    """A row a way; losses also beside the synchronous one's."""
    first = results[0]
    rows = [
        f"{'way':<32}{'training':>18}{'validation':>18}{'accuracy':>10}{'MB sent':>10}{'fewer':>9}"
    ]
    for result in results:
        accuracy = "-" if result.accuracy is None else f"{100 * result.accuracy:.1f} %"
        rows.append(
            f"{result.way:<32}{_beside(result.training_loss, first.training_loss):>18}"
            f"{_beside(result.validation_loss, first.validation_loss):>18}{accuracy:>10}"
            f"{result.sent_bytes / 1e6:>10.2f}{f'{first.sent_bytes / result.sent_bytes:.1f}x':>9}"
        )
    return "\n".join(rows)


def _beside(loss: float, synchronous: float) -> str:
    return f"{loss:.4f} {100 * (loss / synchronous - 1):+.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--job", choices=SUBJECTS, default="gpt")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=list(WAYS),
        default=list(WAYS),
        metavar="NAME",
        help=f"beside the synchronous one; of {', '.join(WAYS)}",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the job"
    )
    parser.add_argument(
        "--synchronous-first",
        type=int,
        default=0,
        metavar="STEPS",
        help="of every way, with the synchronous plan; the rest goes on from the checkpoint",
    )
    parser.add_argument("--json", help="write every figure to this file")
    options = parser.parse_args()
    settings = dict(word.split("=", 1) for word in options.set)
    results: list[Measurement] = []
    for way in dict.fromkeys([SYNCHRONOUS, *options.ways]):
        try:
            results.append(
                run(
                    way,
                    SUBJECTS[options.job],
                    settings,
                    workers=options.workers,
                    synchronous_first=options.synchronous_first,
                )
            )
        except ContenderFailed as error:
            raise SystemExit(f"{way} failed: {error}") from None
        print(
            table([results[0], results[-1]]).splitlines()[-1],
            f"{results[-1].wall_s:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    print(table(results), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=2))


if __name__ == "__main__":
    main()
