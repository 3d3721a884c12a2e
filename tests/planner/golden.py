"""Prices of many jobs under many plans, so that a change of the planner shows what it changes.

    python -m tests.planner.golden            # what differs from the committed table
    python -m tests.planner.golden --write    # the new table

Nothing is measured: GPUs are described, and CPUs have rates that are stated here.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.regret.held_out import HELD_OUT_JOBS
from benchmarks.regret.jobs import LARGE_JOBS, OTHER_JOBS, SMALL_JOBS, Case
from paceline.base.errors import PacelineError
from paceline.cluster.cluster import Cluster
from paceline.cluster.devices import Device
from paceline.cluster.links import Link
from paceline.planner.estimate import Estimate, estimate
from paceline.planner.problem import PlanningProblem
from paceline.simulate.device import DeviceRates
from paceline.strategies.plan import Plan

TABLE = Path(__file__).with_name("golden.csv")
JOBS: Mapping[str, Case] = {
    name: case
    for name, case in {**SMALL_JOBS, **OTHER_JOBS, **HELD_OUT_JOBS, **LARGE_JOBS}.items()
    if case.threads is None  # prices here know no threads
}
FEW = ("GPT, 128 wide", "four branches")  # of the suite
# Nobody's machine: round figures near those of two cores with AVX-512 and their sockets.
CPU_RATES = DeviceRates(5e10, 1e11, 8e9, 4e9, 5e-6)
CPUS = Cluster(
    tuple(Device("cpu", index, 8 * 2**30) for index in range(4)),
    Link(2e9, 5e-5, wait_s=1e-4, late_s=5e-4),
)
CPU_PLANS = (
    "single",
    "data=2",
    "data=4",
    "data=2 microbatches=2",
    "shard=2",
    "shard=4 zero=2",
    "data=2 shard=2",
    "data=4 local=8",
    "data=2 compress=powersgd",
    "single recompute=full",
    "pipeline=2 microbatches=4",
    "pipeline=2 microbatches=4 schedule=gpipe",
    "tensor=2",
    "data=2 tensor=2",
    "place=2",
    "servers=1 workers=2",
)
GPU_PLANS = (
    "single",
    "data=8",
    "shard=8",
    "shard=8 zero=2",
    "data=2 shard=4",
    "data=8 microbatches=2",
    "data=8 local=8",
    "single recompute=full",
    "tensor=2 data=4",
    "pipeline=2 data=4 microbatches=2",
    "tensor=2 pipeline=2 data=2 microbatches=2",
)
CLUSTERS: Mapping[str, tuple[Cluster, tuple[str, ...]]] = {
    "4 CPUs": (CPUS, CPU_PLANS),
    "8xH100": (Cluster.parse("8xH100"), GPU_PLANS),
    "2x4xRTX4090": (Cluster.parse("2x4xRTX4090"), GPU_PLANS),
}
COLUMNS = ("job", "cluster", "plan", "ms", "parts (ms)", "MiB", "parts (MiB)", "refused")
Row = dict[str, str]


def rows(names: Collection[str] = tuple(JOBS)) -> Iterator[Row]:
    """Yield one row for each job, cluster and plan."""
    for name in names:
        problem = PlanningProblem.of(JOBS[name].make())
        for cluster_name, (cluster, plans) in CLUSTERS.items():
            for text in plans:
                key = {"job": name, "cluster": cluster_name, "plan": text}
                yield dict.fromkeys(COLUMNS, "") | key | _priced(problem, Plan.parse(text), cluster)


def _priced(problem: PlanningProblem, plan: Plan, cluster: Cluster) -> Row:
    try:
        if cluster.nodes:
            return _figures(problem.price(plan, cluster))
        used = replace(cluster, devices=cluster.devices[: plan.world_size])
        return _figures(
            estimate(
                problem.profile,
                plan,
                used,
                batch=problem.job.batch,
                rates=CPU_RATES,
                split=problem.pieces,
                snapshot=False,
            )
        )
    except PacelineError as error:
        return {"refused": str(error).partition("\n")[0]}


def _figures(price: Estimate) -> Row:
    return {
        "ms": f"{price.step_s * 1e3:.4g}",
        "parts (ms)": _parts(price.breakdown, 1e-3),
        "MiB": f"{price.peak_memory_bytes / 2**20:.4g}",
        "parts (MiB)": _parts(price.ledger, 2**20),
    }


def _parts(figures: Mapping[str, float], unit: float) -> str:
    return " ".join(f"{name}={figures[name] / unit:.3g}" for name in sorted(figures))


def committed() -> dict[tuple[str, str, str], Row]:
    """Return the rows of the committed table by job, cluster and plan."""
    with TABLE.open(newline="") as file:
        return {(row["job"], row["cluster"], row["plan"]): row for row in csv.DictReader(file)}


def differences(found: Collection[Row], known: Mapping[tuple[str, str, str], Row]) -> list[str]:
    """Return a line for each figure that differs from the committed one."""
    lines = []
    for row in found:
        key = (row["job"], row["cluster"], row["plan"])
        old = known.get(key, dict.fromkeys(COLUMNS, ""))
        lines += [
            f"{', '.join(key)}: {column} {old[column] or 'nothing'} -> {row[column] or 'nothing'}"
            for column in COLUMNS[3:]
            if row[column] != old[column]
        ]
    return lines


def main() -> int:
    """Print what differs from the committed table, or write the table."""
    found = list(rows())
    if "--write" in sys.argv:
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
        return 0
    lines = differences(found, committed())
    print("\n".join(lines) or f"{len(found)} prices as committed")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
