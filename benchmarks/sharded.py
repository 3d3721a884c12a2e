"""Steps a second of sharded plans on two CPU ranks, beside `data=2`, FSDP2 and DDP by hand, in turns.

    python -m benchmarks.sharded [--job wide] [--rounds 3] [--steps 5]

`wide` is a perceptron of 268 million parameters, `gpt` the byte GPT.
"""

from __future__ import annotations

import argparse
from functools import partial

from benchmarks.throughput import PEERS, compare, run_ours, run_peer, table
from benchmarks.turns import measure, warn_if_busy
from benchmarks.workload import JOBS

PLANS = ("shard=2", "shard=2 zero=2", "data=2")
BY_HAND = {
    "FSDP2 by hand": "benchmarks.contenders.with_fsdp",
    "DDP by hand": PEERS["handwritten DDP"][1],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--job", choices=JOBS, default="wide")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    options = parser.parse_args()
    warn_if_busy()
    ours = {
        plan: ("paceline", partial(run_ours, options.steps, options.job, plan)) for plan in PLANS
    }
    peers = {
        name: (
            "torch",
            partial(run_peer, module, "--steps", str(options.steps), "--job", options.job),
        )
        for name, module in BY_HAND.items()
    }
    records = measure(
        {**ours, **peers}, rounds=options.rounds, say=lambda run: f"{run.steps_per_s:.3f} steps/s"
    )
    for plan in PLANS:
        print(f"\n{plan}\n{table(records, compare(records, plan))}")


if __name__ == "__main__":
    main()
