"""Random faults under every kind of plan: does each run end by itself, with no sample lost and the same weights?

    python -m benchmarks.campaign [--runs 100] [--first 0] [--controls 30] [--cuts] [--json FILE]
    python -m benchmarks.campaign --read FILE...

A run has a seed, which gives its plan and its one to four faults. Bits flip under plans whose replicas are compared.
A control has no fault, and must end without a word. With
--cuts each rank is on a host of its own (network namespaces, as root), and the first fault of a run cuts one off, for
good or for a while. --read prints the table of what earlier commands wrote with --json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.launch.process.faults import KINDS, Fault, Kind, draw
from tests.rehearsal_on_hosts import Cut, rehearse_on_hosts

PLANS = (
    "single",
    "data=2",
    "shard=2",
    "pipeline=2",
    "tensor=2",
    "place=2",
    "data=2 local=3",
    "servers=1 workers=2",
    "servers=1 workers=2 staleness=2",
    "data=2 shard=2",
)
COMPARED = ("data=2", "data=2 shard=2")  # whose replicas hold the same weights
PLANS_OF_HOSTS = ("data=3", "shard=3", "pipeline=3", "tensor=3", "data=3 local=3")
KINDS_ON_HOSTS: tuple[Kind, ...] = ("kill", "stop", "slow", "raise", "preempt")  # beside the cut
BACK_S = 12.0  # after which a host that is not cut off for good is back
STEPS, SAVE_EVERY, TIMEOUT_S = 24, 6, 5.0


def job() -> pl.Job:
    """Small, so that what is measured is the recovery."""
    source = torch.Generator().manual_seed(0)
    pairs = TensorDataset(
        torch.randn(50, 8, generator=source).double(), torch.randn(50, 4, generator=source).double()
    )
    return pl.Job(
        model=net,
        data=pairs,
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=0.01),
        batch=12,
        steps=STEPS,
        precision="float64",
    )


def net() -> nn.Module:
    """As many layers as a plan here has stages."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def drawn(seed: int, *, num_faults: int, cuts: bool) -> tuple[str, list[Fault]]:
    """The plan and the faults of a run."""
    plans = PLANS_OF_HOSTS if cuts else PLANS
    plan, source = plans[seed % len(plans)], random.Random(seed)
    kinds = KINDS_ON_HOSTS if cuts else tuple(KINDS)
    if not cuts and plan not in COMPARED:
        kinds = tuple(kind for kind in kinds if kind != "flip")
    if not cuts or not num_faults:
        return plan, draw(
            num_faults,
            seed=seed,
            world_size=pl.Plan.parse(plan).world_size,
            steps=STEPS,
            kinds=kinds,
        )
    is_back = source.random() < 0.5
    # Without the first host the others can't go on: it is back in each case.
    cut = Cut.of(
        source.randint(0 if is_back else 1, 2),
        source.randint(2, STEPS - 4),
        BACK_S if is_back else None,
    )
    rest = draw(num_faults - 1, seed=seed, world_size=2, steps=STEPS, kinds=kinds)
    return plan, [cut, *rest]


def rehearsed(seed: int, *, num_faults: int, cuts: bool) -> dict[str, Any]:
    """One run of the campaign; "named": whether each message of a launch that failed names a rank that was struck."""
    plan, faults = drawn(seed, num_faults=num_faults, cuts=cuts)
    with tempfile.TemporaryDirectory() as where, contextlib.redirect_stderr(sys.stdout):
        outcome = (rehearse_on_hosts if cuts else pl.rehearse)(
            job(),
            plan,
            faults,
            run=Path(where) / "run",
            save_every=SAVE_EVERY,
            timeout_s=TIMEOUT_S,
        )
    ranks = {fault.host if isinstance(fault, Cut) else fault.rank for fault in faults}
    told = [
        message
        for message in outcome.messages
        if not message.startswith(("it was ended", "stopped by"))
    ]
    return {
        "seed": seed,
        "faults": [str(fault) for fault in faults],
        **outcome.to_dict(),
        "named": all(names(message, ranks) for message in told),
    }


def names(message: str, ranks: Collection[int]) -> bool:
    """Whether the first rank in a message is one of these; where two replicas differ, whether one of them is."""
    named = [int(number) for number in re.findall(r"rank (\d+)", message)]
    return not set(named if "differs between" in message else named[:1]).isdisjoint(ranks)


def tables(rehearsals: Sequence[dict[str, Any]]) -> str:
    """What came of all runs, by plan and by the kind of the faults that struck, in Markdown."""
    runs = [run for run in rehearsals if run["faults"]]
    controls = [run for run in rehearsals if not run["faults"]]
    waits: dict[str, list[float | None]] = {}
    struck = Counter[tuple[str, str]]()
    for run in runs:
        for effect in run["effects"]:
            if effect["step"] is not None:
                kind = effect["fault"].split()[0]
                waits.setdefault(kind, []).append(effect["next_step_s"])
                struck[run["plan"], kind] += 1
    kinds = sorted(waits)
    lines = [
        f"| plan | runs | passed | culprit named | steps again | {' | '.join(kinds)} |",
        "|---" * (5 + len(kinds)) + "|",
    ]
    for plan in dict.fromkeys(run["plan"] for run in sorted(runs, key=lambda run: run["seed"])):
        of_plan = [run for run in runs if run["plan"] == plan]
        figures = [
            len(of_plan),
            sum(run["passed"] for run in of_plan),
            sum(run["named"] for run in of_plan),
            sum(run["recomputed_updates"] for run in of_plan),
            *(struck[plan, kind] for kind in kinds),
        ]
        lines.append(f"| `{plan}` | {' | '.join(map(str, figures))} |")
    lines += ["", "| fault | struck | next applied step, s: median | most |", "|---|---|---|---|"]
    for kind, seconds in sorted(waits.items()):
        known = [second for second in seconds if second is not None] or [0.0]
        lines.append(
            f"| `{kind}` | {len(seconds)} | {statistics.median(known):.2f} | {max(known):.2f} |"
        )
    failed = ", ".join(
        str(run["seed"]) for run in rehearsals if not (run["passed"] and run["named"])
    )
    lost = sum(run["samples_lost"] + run["samples_repeated"] for run in rehearsals)
    lines += [
        "",
        f"{len(runs)} runs, {sum(run['passed'] for run in runs)} passed, "
        f"{sum(run['named'] for run in runs)} named the culprit, {lost} samples lost or repeated; "
        f"{len(controls)} controls, {sum(is_silent(run) for run in controls)} without an alarm; "
        f"failed: {failed or 'none'}",
    ]
    return "\n".join(lines)


def is_silent(control: dict[str, Any]) -> bool:
    """Whether an undisturbed run ended in one launch, without a restart."""
    return bool(
        control["passed"] and control["exit_codes"] == [0] and control["audit"]["launches"] == 1
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--controls", type=int, default=30)
    parser.add_argument("--cuts", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, nargs="+")
    options = parser.parse_args()
    if options.read is not None:
        print(tables([run for path in options.read for run in json.loads(path.read_text())]))
        return
    rehearsals: list[dict[str, Any]] = []
    for number in range(options.runs + options.controls):
        seed = options.first + number
        is_control = number >= options.runs
        rehearsals.append(
            rehearsed(seed, num_faults=0 if is_control else 1 + seed % 4, cuts=options.cuts)
        )
        latest = rehearsals[-1]
        waits = [
            effect["next_step_s"]
            for effect in latest["effects"]
            if effect["next_step_s"] is not None
        ]
        print(
            f"{seed:4} {latest['plan']:34} {'passed' if latest['passed'] else 'FAILED'} "
            f"{'named' if latest['named'] else 'NOT NAMED':9} {max(waits, default=0):6.2f} s "
            f"{latest['recomputed_updates']:3} again  {', '.join(latest['faults'])}",
            flush=True,
        )
        if options.json is not None:
            options.json.write_text(json.dumps(rehearsals, indent=1))
    print(tables(rehearsals))


if __name__ == "__main__":
    main()
