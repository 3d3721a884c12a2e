"""The byte GPT with compile=blocks and without: its speed, what compiling costs, and when that is paid back.

    python -m benchmarks.compile [--pairs 100] [--batch 32] [--json]

One process with one thread takes a step with compiled blocks and one without in turns, on the same samples. Figures are
CPU seconds of the process and of the compilers that it starts, which others on the machine hardly change. The gain of a
step is the median over pairs, with its 95 % interval. Compiling starts with an empty cache. The break-even number of
steps is what compiling takes by what a step gains; beside it stands what the planner prices before anything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.turns import Ratio, ratio, warn_if_busy
from benchmarks.workload import EXAMPLE

CACHE = "TORCHINDUCTOR_CACHE_DIR"
WARM_UP_PAIRS = 3


@dataclass(frozen=True, slots=True)
class Figures:
    """eager_s, compiled_s: of a step. start_s: of compiling, forward and backward."""

    eager_s: float
    compiled_s: float
    start_s: float

    @property
    def break_even(self) -> float:
        """Steps after which compiling is paid back; infinite if it never is.

        >>> Figures(eager_s=0.5, compiled_s=0.25, start_s=30.0).break_even
        120.0
        """
        gain_s = self.eager_s - self.compiled_s
        return self.start_s / gain_s if gain_s > 0 else float("inf")


def cpu_s() -> float:
    """Of this process and of those it has started and waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measured(batch: int, pairs: int) -> tuple[Figures, Ratio]:
    """And how long a compiled step takes of an uncompiled one, pair by pair."""
    import torch

    import paceline as pl
    from paceline.plans import Plan
    from paceline.strategies.compile import run as compile_blocks
    from paceline.strategies.mesh import Mesh

    torch.set_num_threads(1)
    job = pl.load(str(EXAMPLE), {"batch": batch})
    model = job.model()
    optimizer = job.optimizer(model.named_parameters())
    inputs, targets = (torch.stack(tensors) for tensors in zip(*(job.data[k] for k in range(batch)), strict=True))
    blocks = list(model.blocks)
    eager = [block.forward for block in blocks]
    plan = Plan.parse("single compile=blocks")
    compile_blocks.prepare(model, plan=plan, mesh=Mesh(plan.axes.sizes(), 0))
    compiled = [block.forward for block in blocks]

    def step(forwards: list[Any]) -> float:
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward
        began_s = cpu_s()
        job.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        return cpu_s() - began_s

    step(eager)
    first_s = step(compiled)
    taken = [(step(eager), step(compiled)) for _ in range(WARM_UP_PAIRS + pairs)][WARM_UP_PAIRS:]
    eager_s, compiled_s = ([pair[k] for pair in taken] for k in (0, 1))
    of_one = ratio(compiled_s, eager_s)
    step_s = statistics.median(eager_s)
    return Figures(step_s, step_s * of_one.median, first_s - step_s), of_one


def priced(batch: int) -> Figures:
    """What the planner says of one thread, from this machine's rates."""
    import paceline as pl
    from paceline.cluster import Cluster
    from paceline.planner.estimate import estimate
    from paceline.plans import Plan
    from paceline.profile import profile_job
    from paceline.profile.device import measure_device

    profile, cluster, rates = profile_job(pl.load(str(EXAMPLE))), Cluster.local("cpu:0"), measure_device("cpu")
    eager, compiled = (estimate(profile, Plan.parse(text), cluster, batch=batch, rates=rates)
                       for text in ("single", "single compile=blocks"))
    return Figures(eager.step_s, compiled.step_s, compiled.start_s)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=100, help="steps of each kind")
    parser.add_argument("--batch", type=int, default=32, help="samples a step")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()
    warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-cache-") as cache:
        os.environ[CACHE] = cache
        found, of_one = measured(options.batch, options.pairs)
    said = priced(options.batch)
    if options.json:
        print(json.dumps({"measured": {**asdict(found), "break_even": found.break_even, "ratio": asdict(of_one)},
                          "priced": {**asdict(said), "break_even": said.break_even}}, indent=2))
        return
    print(f"{'':<10}{'step s':>10}{'compiled s':>12}{'compiling s':>13}{'break-even steps':>18}")
    for name, one in (("measured", found), ("priced", said)):
        print(f"{name:<10}{one.eager_s:>10.4f}{one.compiled_s:>12.4f}{one.start_s:>13.1f}{one.break_even:>18.0f}")
    print(f"a compiled step takes {of_one} of an uncompiled one, over {options.pairs} pairs; "
          f"the predicted break-even is {said.break_even / found.break_even - 1:+.0%} off")
    if of_one.high is not None and of_one.high >= 1.0:
        print("the interval holds 1: the gain is not known, nor the break-even", file=sys.stderr)


if __name__ == "__main__":
    main()
