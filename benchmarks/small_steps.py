"""Steps of 2 to 20 ms over tensors in memory on two CPU ranks of one thread each, beside loops by hand, in turns.

A job and a loop of one's own with `pl.attach` are both held beside each peer.

python -m benchmarks.small_steps [--rounds 7] [--steps 1000] [--jobs NAME...] [--peers NAME...] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial

from benchmarks.throughput import OURS, Run, compare, run_ours, run_peer
from benchmarks.turns import Ratio, Record, document, measure, warn_if_busy
from benchmarks.workload import JOBS, WARM_UP_STEPS

ATTACH = "attach"
# The package that each needs, and the module that runs it.
LOOPS = {
    ATTACH: (OURS, "benchmarks.contenders.with_attach"),
    "sliced DDP": ("torch", "benchmarks.contenders.sliced"),
    "DDP": ("torch", "benchmarks.contenders.handwritten"),
    "accelerate": ("accelerate", "benchmarks.contenders.with_accelerate"),
}
PEERS = [name for name in LOOPS if name != ATTACH]
SMALL_JOBS = [name for name in JOBS if name.endswith("ms")]


def measured(job: str, options: argparse.Namespace) -> dict[str, Record[Run]]:
    steps = str(options.steps)
    peers = {
        name: (package, partial(run_peer, module, "--steps", steps, "--job", job))
        for name, (package, module) in LOOPS.items()
        if name in (ATTACH, *options.peers)
    }
    return measure(
        {OURS: (OURS, partial(run_ours, options.steps, job)), **peers},
        rounds=options.rounds,
        say=lambda run: f"{1e3 / run.steps_per_s:.2f} ms, loss {run.final_loss:.3f}",
    )


def rows(job: str, records: dict[str, Record[Run]], *of_ours: Mapping[str, Ratio]) -> list[str]:
    return [
        f"{job:<6} {name:<12} "
        + (
            f"skipped: {record.skipped}"
            if record.skipped
            else f"{1e3 / record.median('steps_per_s'):>7.2f}   "
            + "   ".join(f"{ratios.get(name, '')!s:<20}" for ratios in of_ours)
        ).rstrip()
        for name, record in records.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small_steps", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each; an interval needs 6")
    parser.add_argument(
        "--steps", type=int, default=1000, help=f"measured steps, after {WARM_UP_STEPS} of warm-up"
    )
    parser.add_argument("--jobs", nargs="+", choices=SMALL_JOBS, default=SMALL_JOBS)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    warn_if_busy()
    documents = {}
    lines = [
        f"{'job':<6} {'':<12} ms/step   {OURS} / peer          {ATTACH} / peer, in steps a second, "
        "median of pairs [95 %]"
    ]
    for job in options.jobs:
        records = measured(job, options)
        ratios, of_attach = compare(records), compare(records, ATTACH)
        both = ratios | {f"{ATTACH} / {name}": each for name, each in of_attach.items()}
        documents[job] = document(records, both)
        lines += rows(job, records, ratios, of_attach)
    print(json.dumps(documents, indent=2) if options.json else "\n".join(lines))


if __name__ == "__main__":
    main()
