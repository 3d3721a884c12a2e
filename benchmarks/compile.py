"""A small GPT with and without compile=blocks: its speed, the time of compiling, and when that time is paid back.

    python -m benchmarks.compile [--form gpt|llama] [--pairs 100] [--batch 32] [--json]

The model is the byte GPT of the examples, or one of its size in Llama's form: RMS norms, rotary positions and SwiGLU,
which are chains of small operators. Each part runs in a separate process with one thread, which keeps its heap as ranks
do. It compiles from nothing: torch's cache and its precompiled headers are empty.

measured: a step with compiled blocks and one without, in turns, on the same samples, in CPU seconds of the process and
    of the compilers that it starts, which other load changes least. The gain of a step is the median over pairs, with
    its 95 % interval. The break-even number of steps is the time of compiling divided by the gain of a step.
rehearsed: what `plan` knows of both plans after it has rehearsed them. priced: what it says before anything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import paceline as pl
from benchmarks.turns import Ratio, ratio, run_command, warn_if_busy
from benchmarks.workload import EXAMPLE

WARM_UP_PAIRS = 3
PLANS = ("single", "single compile=blocks")
TIMEOUT_S = 7200.0


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


def the_job(form: str, batch: int) -> pl.Job:
    from paceline.models.sizes import DecoderSize

    from paceline.models.decoder import Decoder

    job = pl.load(str(EXAMPLE), {"batch": batch})
    if form == "gpt":
        return job
    size = DecoderSize(layers=4, hidden=256, heads=4, ffn=704, vocab=256, sequence=128, form="llama")
    return replace(job, model=lambda: Decoder(size))


def cpu_s() -> float:
    """Of this process and of those it has started and waited for."""
    times = os.times()  # in hundredths; of the others that is fine enough
    return time.process_time() + times.children_user + times.children_system


def measured(job: pl.Job, pairs: int) -> tuple[Figures, Ratio]:
    """And how long a compiled step takes of an uncompiled one, pair by pair."""
    import torch

    from paceline.launch.process import set_up_heap
    from paceline.plans import Plan
    from paceline.strategies.compile import run as compile_blocks
    from paceline.strategies.mesh import Mesh

    set_up_heap(keep=True)
    model = job.model()
    optimizer = job.optimizer(model.named_parameters())
    inputs, targets = (torch.stack(tensors) for tensors in zip(*(job.data[k] for k in range(job.batch)), strict=True))
    plan = Plan.parse(PLANS[1])
    compiled = compile_blocks.prepare(model, plan=plan, mesh=Mesh(plan.axes.sizes(), 0))

    def step(*, on: bool) -> float:
        compiled.switch(on=on)
        began_s = cpu_s()
        job.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        return cpu_s() - began_s

    step(on=False)
    first_s = step(on=True)
    taken = [(step(on=False), step(on=True)) for _ in range(WARM_UP_PAIRS + pairs)][WARM_UP_PAIRS:]
    eager_s, compiled_s = ([pair[k] for pair in taken] for k in (0, 1))
    of_one = ratio(compiled_s, eager_s)
    step_s = statistics.median(eager_s)
    return Figures(step_s, step_s * of_one.median, first_s - step_s), of_one


def predicted(job: pl.Job, *, rehearsing: bool) -> Figures:
    """What the planner says of one device with one thread."""
    from paceline.cluster import Cluster
    from paceline.planner.corrections import Corrections
    from paceline.planner.estimate import estimate
    from paceline.plans import Plan
    from paceline.profile import profile_job
    from paceline.profile.device import measure_device
    from paceline.verbs.rehearsal import rehearse

    profile, cluster, rates, known = profile_job(job), Cluster.local("cpu:0"), measure_device("cpu"), Corrections()
    plans = [Plan.parse(text) for text in PLANS]
    said = {plan: estimate(profile, plan, cluster, batch=job.batch, rates=rates) for plan in plans}
    if rehearsing:
        for plan in plans:
            known.add(plan, said[plan], rehearse(job, cluster, plan, said[plan].step_s))
        said = {plan: known.apply(plan, said[plan]) for plan in plans}
    eager, compiled = (said[plan] for plan in plans)
    return Figures(eager.step_s, compiled.step_s, compiled.start_s)


PARTS: dict[str, Callable[[pl.Job, int], tuple[Figures, Ratio | None]]] = {
    "measured": measured,
    "rehearsed": lambda job, pairs: (predicted(job, rehearsing=True), None),
    "priced": lambda job, pairs: (predicted(job, rehearsing=False), None),
}


def apart(part: str, options: argparse.Namespace) -> tuple[Figures, Ratio | None]:
    """A part in a process that finds nothing compiled."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as empty:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TMPDIR"] = empty
        told = run_command([sys.executable, "-m", "benchmarks.compile", "--part", part, "--form", options.form,
                            "--batch", str(options.batch), "--pairs", str(options.pairs)], timeout_s=TIMEOUT_S)
    found = json.loads(told.splitlines()[-1])
    return Figures(**found["figures"]), found["ratio"] and Ratio(**found["ratio"])


def report(found: dict[str, Figures], of_one: Ratio, pairs: int) -> None:
    """For people."""
    print(f"{'':<10}{'step s':>10}{'compiled s':>12}{'compiling s':>13}{'break-even steps':>18}{'off':>7}")
    true = found["measured"]
    for name, one in found.items():
        is_known = name != "measured" and true.break_even < float("inf")
        off = f"{one.break_even / true.break_even - 1:+.0%}" if is_known else ""
        print(f"{name:<10}{one.eager_s:>10.4f}{one.compiled_s:>12.4f}{one.start_s:>13.1f}{one.break_even:>18.0f}{off:>7}")
    print(f"a compiled step takes {of_one} of an uncompiled one, over {pairs} pairs")
    if of_one.low is None or of_one.high is None:
        return
    low, high = (replace(true, compiled_s=part * true.eager_s).break_even for part in (of_one.low, of_one.high))
    print(f"by that interval compiling is paid back after {low:.0f} to {high:.0f} steps")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--form", choices=("gpt", "llama"), default="gpt", help="of the model")
    parser.add_argument("--pairs", type=int, default=100, help="steps of each kind")
    parser.add_argument("--batch", type=int, default=32, help="samples a step")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        figures, of_one = PARTS[options.part](the_job(options.form, options.batch), options.pairs)
        print(json.dumps({"figures": asdict(figures), "ratio": of_one and asdict(of_one)}))
        return
    warn_if_busy()
    parts = {part: apart(part, options) for part in PARTS}
    found, of_one = {part: figures for part, (figures, _) in parts.items()}, parts["measured"][1]
    assert of_one is not None
    if options.json:
        print(json.dumps({**{name: {**asdict(one), "break_even": one.break_even} for name, one in found.items()},
                          "ratio": asdict(of_one)}, indent=2))
        return
    report(found, of_one, options.pairs)


if __name__ == "__main__":
    main()
