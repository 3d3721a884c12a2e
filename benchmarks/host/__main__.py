"""Host time of a step on two pretended GPUs, beside hand-written loops, in turns.

    python -m benchmarks.host [--rounds 7] [--steps 40] [--plans PLAN...] [--json]

The model is so small that a step is only the launching by Python and torch. The pretended device runs its kernels on
the host, so their time is in every figure alike, and ratios are nearer to 1 than on a GPU. Messages go through gloo;
the time of its threads is in the first figures and left out of the second ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu.command import run as run_command
from benchmarks.host.model import WARM_UP_STEPS
from benchmarks.turns import ROOT, ContenderFailed, document, measure, ratio, warn_if_busy

# Ours, the loop by hand that does the same, and what the ratio is to stay below.
PAIRS = {
    "single": ("plain loop", 1.1),
    "data=2": ("DistributedDataParallel", 1.1),
    "shard=2": ("FSDP2", 1.1),
    "tensor=2": ("torch tensor parallel", 0.5),
}


@dataclass(frozen=True, slots=True)
class Run:
    """host_s: the median step's CPU seconds of rank 0, all threads together. without_gloo_s: but for gloo's."""

    host_s: float
    without_gloo_s: float


def run(library: str, name: str, steps: int) -> Run:
    command = [
        sys.executable,
        "-m",
        "pretended_cuda.pretend",
        library,
        "-m",
        "benchmarks.host.contender",
        name,
    ]
    ended = run_command([*command, str(WARM_UP_STEPS + steps)])
    if ended.exit_code != 0:
        raise ContenderFailed(ended.reason)
    measured = json.loads(ended.stdout.strip().splitlines()[-1])[WARM_UP_STEPS:]
    return Run(*map(statistics.median, zip(*measured, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each; an interval needs 6")
    parser.add_argument(
        "--steps", type=int, default=40, help=f"measured steps, after {WARM_UP_STEPS} of warm-up"
    )
    parser.add_argument(
        "--plans", nargs="+", choices=PAIRS, default=list(PAIRS), help="of ours; default: all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    devices = ROOT / "tests" / "devices"
    sys.path.insert(0, str(devices))
    os.environ |= {"PYTHONPATH": str(devices), "OMP_NUM_THREADS": "1"}
    from pretended_cuda.build import build

    library = str(build())
    warn_if_busy()
    pairs = {plan: PAIRS[plan] for plan in options.plans}
    names = [name for plan, (by_hand, _) in pairs.items() for name in (by_hand, plan)]
    records = measure(
        {name: ("torch", partial(run, library, name, options.steps)) for name in names},
        rounds=options.rounds,
        say=lambda record: (
            f"{1e3 * record.host_s:.2f} ms, {1e3 * record.without_gloo_s:.2f} without gloo"
        ),
    )
    measured = {
        plan: by_hand
        for plan, (by_hand, _) in pairs.items()
        if not (records[plan].skipped or records[by_hand].skipped)
    }
    ratios = {
        figure: {
            plan: ratio(records[plan].all(figure), records[by_hand].all(figure))
            for plan, by_hand in measured.items()
        }
        for figure in ("host_s", "without_gloo_s")
    }
    if options.json:
        print(
            json.dumps(
                document(
                    records,
                    ratios["host_s"]
                    | {
                        f"{plan}, without gloo": value
                        for plan, value in ratios["without_gloo_s"].items()
                    },
                ),
                indent=2,
            )
        )
        return
    print(
        f"{'':<10} {'host ms':>8}   {'by hand':<24} {'host ms':>8}   ratio, median of pairs [95 %], and its goal"
    )
    for plan, (by_hand, goal) in pairs.items():
        skipped = records[plan].skipped or records[by_hand].skipped
        print(
            f"{plan:<10} skipped: {skipped}"
            if skipped
            else f"{plan:<10} {1e3 * records[plan].median('host_s'):>8.2f}   {by_hand:<24} "
            f"{1e3 * records[by_hand].median('host_s'):>8.2f}   {ratios['host_s'][plan]}, at most {goal}; "
            f"without gloo {ratios['without_gloo_s'][plan]}"
        )


if __name__ == "__main__":
    main()
