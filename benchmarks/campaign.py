"""Random faults under every kind of plan: does each run end by itself, with no sample lost and the same weights?

    python -m benchmarks.campaign [--runs 100] [--first 0] [--controls 30] [--flips] [--cuts] [--json FILE]

A run has a seed, which gives its plan and its one to four faults. A control has none, and must end without a word.
With --cuts each rank is on a host of its own (network namespaces, as root), and the first fault of a run cuts one off,
for good or for a while.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.launch.faults import ON_ONE_HOST, Fault, Kind, draw

PLANS = ("single", "data=2", "shard=2", "pipeline=2", "tensor=2", "place=auto parts=2", "data=2 local=3",
         "server=1 workers=2", "server=1 workers=2 staleness=2", "data=2 shard=2")
PLANS_OF_HOSTS = ("data=3", "shard=3", "pipeline=3", "tensor=3", "data=3 local=3")
KINDS_ON_HOSTS: tuple[Kind, ...] = ("kill", "stop", "slow", "raise", "preempt")  # beside the cut
BACK_S = 12.0  # after which a host that is not cut off for good is back
STEPS, SAVE_EVERY, TIMEOUT_S = 24, 6, 5.0


def job() -> pl.Job:
    """Small, so that what is measured is the recovery."""
    source = torch.Generator().manual_seed(0)
    pairs = TensorDataset(torch.randn(50, 8, generator=source).double(), torch.randn(50, 4, generator=source).double())
    return pl.Job(model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), data=pairs,
                  loss=nn.functional.mse_loss, optimizer=lambda named: torch.optim.AdamW(named, lr=0.01), batch=12,
                  steps=STEPS, precision="float64")


def drawn(seed: int, *, num_faults: int, flips: bool, cuts: bool) -> tuple[str, list[Fault]]:
    """The plan and the faults of a run."""
    plans = PLANS_OF_HOSTS if cuts else PLANS
    plan, source = plans[seed % len(plans)], random.Random(seed)
    kinds = KINDS_ON_HOSTS if cuts else tuple(kind for kind in ON_ONE_HOST if flips or kind != "flip")
    if not cuts or not num_faults:
        return plan, draw(num_faults, seed=seed, world_size=pl.Plan.parse(plan).world_size, steps=STEPS, kinds=kinds)
    is_back = source.random() < 0.5
    cut = Fault("cut", source.randint(1, 2), source.randint(2, STEPS - 4), heals_s=BACK_S if is_back else None)
    rest = draw(num_faults - 1, seed=seed, world_size=2, steps=STEPS, kinds=kinds)
    return plan, [cut, *rest]


def rehearsed(seed: int, *, num_faults: int, flips: bool, cuts: bool) -> dict[str, Any]:
    """One run of the campaign; "named": whether each message of a launch that failed names a rank that was struck."""
    plan, faults = drawn(seed, num_faults=num_faults, flips=flips, cuts=cuts)
    with tempfile.TemporaryDirectory() as where, contextlib.redirect_stderr(sys.stdout):
        outcome = pl.rehearse(job(), plan, faults, run=Path(where) / "run", save_every=SAVE_EVERY, timeout_s=TIMEOUT_S)
    ranks = {f"rank {fault.rank}" for fault in faults}
    told = [message for message in outcome.messages if not message.startswith(("it was ended", "stopped by"))]
    return {"seed": seed, "faults": [str(fault) for fault in faults], **outcome.to_dict(),
            "named": all(any(rank in message for rank in ranks) for message in told)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--controls", type=int, default=30)
    parser.add_argument("--flips", action="store_true")
    parser.add_argument("--cuts", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = []
    for number in range(asked.runs + asked.controls):
        seed = asked.first + number
        is_control = number >= asked.runs
        found.append(rehearsed(seed, num_faults=0 if is_control else 1 + seed % 4, flips=asked.flips,
                               cuts=asked.cuts))
        latest = found[-1]
        waits = [effect["next_step_s"] for effect in latest["effects"] if effect["next_step_s"] is not None]
        print(f"{seed:4} {latest['plan']:34} {'passed' if latest['passed'] else 'FAILED'} "
              f"{'named' if latest['named'] else 'NOT NAMED':9} {max(waits, default=0):6.2f} s "
              f"{latest['recomputed_updates']:3} again  {', '.join(latest['faults'])}", flush=True)
        if asked.json is not None:
            asked.json.write_text(json.dumps(found, indent=1))
    waits = [effect["next_step_s"] for each in found for effect in each["effects"] if effect["next_step_s"] is not None]
    print(f"{sum(each['passed'] for each in found)} of {len(found)} passed, {sum(each['named'] for each in found)} "
          f"named the culprit; next applied step after {statistics.median(waits or [0]):.2f} s in the median, "
          f"{max(waits, default=0):.2f} s at most")


if __name__ == "__main__":
    main()
