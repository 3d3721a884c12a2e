"""The same on the cluster lab: hosts with slow links, whose devices take the time that they are told to.

python -m benchmarks.regret.lab [--hosts 4] [--mbit-s 100 400 1000] [--rounds 2] [--json FILE]     # Linux, root
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.cluster import Failed, Way, run
from benchmarks.lab.hosts import NoLab, hosts
from benchmarks.lab.paced import Pace
from benchmarks.regret.__main__ import JobResult, Measured, table
from paceline.cluster.catalogue import accelerator
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Nodes, described
from paceline.cluster.links import Link, Network
from paceline.cluster.software import Software
from paceline.model.cost.profile import Affine, Parameter, Profile, Segment, Work
from paceline.planner.estimate import estimate
from paceline.planner.search import Candidate, RankedPlans
from paceline.strategies.plan import Plan

STEP_S, MEGABYTES, LAYERS, SAMPLES, STEPS = 0.5, 12.5, 16, 8, 14
CARRIED = 0.952  # of a link's rate: what is left beside headers, measured by netcat
# Of one device, a second's FLOPs; what launches and kernels add lies beside a sleeping device.
DEVICE_FLOPS_PER_S = 1e12
PACED = Software(
    product_rate=1.0,
    operator_s=0.0,
    kernel_s=0.0,
    hook_s=0.0,
    slowdown=0.0,
    context_bytes=0.0,
    reserved=1.0,
    memory_rate=1.0,
)
PLANS = (
    "data={n}",
    "shard={n} zero=1",
    "shard={n} zero=2",
    "shard={n}",
    "data=2 shard=2",
    "servers=1 workers={n}",
    "servers=1 workers={n} colocate=yes",
    "servers={n} workers={n} colocate=yes",
    "data={n} compress=bf16",
    "servers={n} workers={n} colocate=yes compress=bf16",
    "servers={n} workers={n} colocate=yes staleness=1",
)


def profile() -> Profile:
    """Of `benchmarks/lab/paced.py`: a third of a step forward, in equal layers, in proportion to its samples."""
    sample_flops = STEP_S * DEVICE_FLOPS_PER_S / LAYERS / SAMPLES
    weight = Parameter("weight", "layers", round(MEGABYTES * 1e6 / LAYERS), rows=1000, count=LAYERS)
    return Profile(
        parameters=(weight,),
        is_layered=True,
        segments=(
            Segment(
                "layers",
                Work(flops=Affine(0, sample_flops / 3)),
                Work(flops=Affine(0, sample_flops * 2 / 3)),
                gradients=("weight",),
                repeat=LAYERS,
            ),
        ),
    )


def cluster(count: int, mbit_s: float) -> Cluster:
    chip = replace(
        accelerator("A100"),
        bf16_flops_per_s=DEVICE_FLOPS_PER_S,
        product_reached=1.0,
        memory_bytes_per_s=1e30,
    )
    link = Link(mbit_s * 1e6 / 8 * CARRIED, 1e-4)
    return Cluster.of((Nodes(count, (described(chip),), Network(link, link, 1)),))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regret.lab", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit-s", type=float, nargs="+", default=[100.0, 400.0, 1000.0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    results: dict[str, JobResult] = {}
    try:
        for rate in options.mbit_s:
            results[f"{options.hosts} hosts, {rate:g} Mbit/s"] = _measure(
                options.hosts, rate, rounds=options.rounds
            )
    except NoLab as error:
        raise SystemExit(f"skipped: {error}") from None
    print(table(results))
    if options.json:
        Path(options.json).write_text(
            json.dumps({name: asdict(result) for name, result in results.items()}, indent=1)
        )


def _measure(count: int, mbit_s: float, *, rounds: int) -> JobResult:
    price = cluster(count + 1, mbit_s)
    candidates = [
        Candidate(
            plan,
            estimate(
                profile(), plan, price, batch=count * SAMPLES, precision="bf16", software=PACED
            ),
        )
        for plan in (Plan.parse(text.format(n=count)) for text in PLANS)
    ]
    ranked = RankedPlans(sorted(candidates, key=lambda candidate: candidate.estimate.step_s))
    taken = [Measured.of(candidate, candidate) for candidate in candidates]
    with hosts(count + 1, mbit_s=mbit_s) as lab:
        for _ in range(rounds):
            for row in taken:
                try:
                    way = Way(row.plan, row.plan)
                    row.step_s.append(
                        run(
                            way,
                            lab,
                            workers=count,
                            mbit_s=mbit_s,
                            step_s=STEP_S,
                            megabytes=MEGABYTES,
                            steps=STEPS,
                            paces=[Pace()] * count,
                        ).step_s
                    )
                    print(
                        f"{mbit_s:g} Mbit/s: {row.plan}: {row.step_s[-1]:.3f} s, {row.predicted_s:.3f} said",
                        file=sys.stderr,
                        flush=True,
                    )
                except Failed as error:
                    row.failed = str(error).partition("\n")[0]
                    print(row.failed, file=sys.stderr, flush=True)
    assert ranked.chosen is not None
    return JobResult(str(ranked.chosen.plan), taken, str(ranked.chosen.plan))


if __name__ == "__main__":
    main()
