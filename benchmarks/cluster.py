"""How each way of synchronising updates scales over hosts with slow links, on a cluster of network namespaces.

Every host runs the same `paceline train` under the plan. The model is paced (`benchmarks/lab/paced.py`), so two cores
are enough for eight hosts. Efficiency is samples a second, divided by what the hosts would reach without a network,
each at its own speed: one may be slower than the others, or all may stand still in turn.

    python -m benchmarks.cluster [--hosts 1 2 4 8] [--mbit-s 400] [--ways NAME...] [--json FILE] [--plot FILE]
                                 [--slower 3] [--pause-s 2]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab.hosts import Host, NoLab, hosts
from benchmarks.lab.paced import PERIOD, Pace
from benchmarks.turns import ROOT, paceline
from paceline.strategies.plan import Plan

PORT = 29500
SAMPLES = 8  # a host computes in a step
# Steps of every host that are left out: connections and buffers are made in the first, and under staleness nobody is
# given one of the last ahead of its time.
FIRST, LAST = 3, 2
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Way:
    """A way of bringing updates together.

    plan: for so many hosts that compute. scale: of a step's seconds and of the parameters' bytes alike, for ways that
    need many steps.
    """

    name: str
    plan: str
    scale: float = 1.0

    def text(self, workers: int) -> str:
        return (
            "single" if workers == 1 and "server" not in self.plan else self.plan.format(n=workers)
        )

    def steps_to_meet(self, workers: int) -> int:
        outer_steps = Plan.parse(self.text(workers)).outer_steps
        return outer_steps.local if outer_steps is not None else 1


WAYS = (
    Way("all-reduce", "data={n}"),
    Way("all-reduce bf16", "data={n} compress=bf16"),
    Way("one server", "servers=1 workers={n}"),
    Way("shards", "servers={n} workers={n} colocate=yes"),
    Way("shards bf16", "servers={n} workers={n} colocate=yes compress=bf16"),
    Way("shards staleness=1", "servers={n} workers={n} colocate=yes staleness=1"),
    Way(
        "shards staleness=1 bf16", "servers={n} workers={n} colocate=yes staleness=1 compress=bf16"
    ),
    Way("shards staleness=4", "servers={n} workers={n} colocate=yes staleness=4"),
    Way("shards staleness=inf", "servers={n} workers={n} colocate=yes staleness=inf"),
    Way("DiLoCo H=10", "data={n} local=10 outer=diloco"),
    Way("DiLoCo H=100 int8", "data={n} local=100 outer=diloco compress=int8", scale=0.5),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """efficiency: 1 is what the hosts would do without a network. step_s: seconds a step of all hosts."""

    way: str
    workers: int
    mbit_s: float
    efficiency: float
    step_s: float


class Failed(Exception):
    """A run that ended badly, with the end of what it said."""


def run(
    way: Way,
    lab: Sequence[Host],
    *,
    workers: int,
    mbit_s: float,
    step_s: float,
    megabytes: float,
    steps: int,
    paces: Sequence[Pace],
) -> Measurement:
    """Train once on the first hosts of the lab, the last of which compute, each at its pace.

    A way whose hosts meet after many steps takes whole rounds, three at least; the first is left out.

    Raises:
        Failed: a rank failed or the run took too long; nothing of it is left running.
    """
    plan = way.text(workers)
    used = lab[: Plan.parse(plan).world_size]
    step_s, megabytes, every = step_s * way.scale, megabytes * way.scale, way.steps_to_meet(workers)
    steps = max(-(-steps // every), 3 if every > 1 else 1) * every
    with tempfile.TemporaryDirectory(prefix="paceline-lab-") as folder:
        values = {
            "step_s": step_s,
            "megabytes": megabytes,
            "samples": SAMPLES,
            "workers": workers,
            "steps": steps,
        }
        command = paceline(
            "train",
            str(ROOT / "benchmarks" / "lab" / "paced.py"),
            "--plan",
            plan,
            "--run",
            f"{folder}/run",
            "--json",
            *(word for name, value in values.items() for word in ("--set", f"{name}={value}")),
        )
        shared = {
            "WORLD_SIZE": str(len(used)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_PORT": str(PORT),
            "MASTER_ADDR": used[0].address,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        }
        rank_paces = [Pace()] * (len(used) - workers) + list(paces)
        ranks = [
            host.start(command, {**shared, "RANK": str(rank), **pace.environ()})
            for rank, (host, pace) in enumerate(zip(used, rank_paces, strict=True))
        ]
        try:
            deadline = time.monotonic() + TIMEOUT_S
            outputs = [
                rank.communicate(timeout=max(1.0, deadline - time.monotonic())) for rank in ranks
            ]
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{plan}: took longer than {TIMEOUT_S:.0f} s") from error
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    os.killpg(rank.pid, signal.SIGKILL)
                    rank.wait()
        if bad := [outputs[number][1] for number, rank in enumerate(ranks) if rank.returncode]:
            raise Failed(f"{plan}: {bad[0][-2000:]}")
        lines = [
            json.loads(line)
            for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        ]
    loss_lines = [line for line in lines if "loss" in line]
    end = -1 if every > 1 else -1 - LAST  # local steps are told of together
    first, last = loss_lines[max(FIRST, every) - 1], loss_lines[end]
    spent_s = last["time"] - first["time"]
    samples_per_s = (last["samples"] - first["samples"]) / spent_s
    ideal = SAMPLES * sum(1 / pace.mean_step_s(step_s) for pace in paces)  # samples a second
    return Measurement(
        way.name, workers, mbit_s, samples_per_s / ideal, spent_s / (last["step"] - first["step"])
    )


def table(results: Sequence[Measurement], mbit_s: float) -> str:
    """Efficiency in percent: a row a way, a column a number of hosts."""
    counts = sorted({result.workers for result in results})
    cells = {(result.way, result.workers): result for result in results if result.mbit_s == mbit_s}
    rows = [f"{f'{mbit_s:g} Mbit/s':<24}" + "".join(f"{count:>8}" for count in counts)]
    for way in dict.fromkeys(result.way for result in results):
        values = (cells.get((way, count)) for count in counts)
        rows.append(
            f"{way:<24}"
            + "".join(
                f"{100 * result.efficiency:>7.1f}%" if result else f"{'-':>8}" for result in values
            )
        )
    return "\n".join(rows)


def plot(results: Sequence[Measurement], path: str) -> None:
    """Speed-up over one host by number of hosts, a panel a link speed."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rates = sorted({result.mbit_s for result in results})
    figure, panels = plt.subplots(
        1, len(rates), figsize=(5 * len(rates), 4), squeeze=False, sharey=True
    )
    for panel, rate in zip(panels[0], rates, strict=True):
        counts = sorted({result.workers for result in results})
        panel.plot(counts, counts, color="0.8", label="ideal")
        for way in dict.fromkeys(result.way for result in results):
            points = sorted(
                (result.workers, result.workers * result.efficiency)
                for result in results
                if result.way == way and result.mbit_s == rate
            )
            panel.plot(*zip(*points, strict=True), marker="o", label=way)
        panel.set(title=f"{rate:g} Mbit/s", xlabel="hosts")
    panels[0][0].set_ylabel("speed-up over one host")
    panels[0][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=[1, 2, 4, 8], help="hosts that compute"
    )
    parser.add_argument(
        "--mbit-s", type=float, nargs="+", default=[400.0], help="rate of a host's link, each way"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=[way.name for way in WAYS],
        default=[way.name for way in WAYS if way.scale == 1.0],
        help="by default all that take seconds",
    )
    parser.add_argument(
        "--step-s", type=float, default=1.0, help="seconds a host computes in a step"
    )
    parser.add_argument("--megabytes", type=float, default=25.0, help="of float32 parameters")
    parser.add_argument("--steps", type=int, default=16, help="of every host")
    parser.add_argument(
        "--slower", type=float, default=1.0, help="by how much the last host is slower"
    )
    parser.add_argument(
        "--pause-s",
        type=float,
        default=0.0,
        help=f"that each host loses every {PERIOD} steps, in turn",
    )
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--plot", help="draw speed-up over hosts into this file")
    options = parser.parse_args()
    results: list[Measurement] = []
    try:
        for rate in options.mbit_s:
            with hosts(max(options.hosts) + 1, mbit_s=rate) as lab:
                for way in (way for way in WAYS if way.name in options.ways):
                    for workers in options.hosts:
                        results += _tried(way, lab, workers=workers, mbit_s=rate, options=options)
            print(table(results, rate), flush=True)
    except NoLab as error:
        raise SystemExit(f"skipped: {error}") from None
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=2))
    if options.plot:
        plot(results, options.plot)


def _tried(
    way: Way, lab: Sequence[Host], *, workers: int, mbit_s: float, options: Any
) -> list[Measurement]:
    paces = [
        Pace(
            options.slower if host == workers - 1 else 1.0,
            options.pause_s,
            host * PERIOD // workers,
        )
        for host in range(workers)
    ]
    try:
        result = run(
            way,
            lab,
            workers=workers,
            mbit_s=mbit_s,
            step_s=options.step_s,
            megabytes=options.megabytes,
            steps=options.steps,
            paces=paces,
        )
    except Failed as error:
        print(f"{way.name} on {workers} hosts failed: {error}", file=sys.stderr, flush=True)
        return []
    print(
        f"{way.name} on {workers}: {result.step_s:.2f} s a step, {100 * result.efficiency:.1f} %",
        file=sys.stderr,
        flush=True,
    )
    return [result]


if __name__ == "__main__":
    main()
