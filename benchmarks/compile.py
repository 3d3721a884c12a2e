"""A small GPT with and without compile=blocks: its speed, the time of compiling, and when that time is paid back.

    python -m benchmarks.compile [--form gpt|llama] [--pairs 100] [--batch 32] [--calibrations 1] [--json]

The model is the byte GPT of the examples, or one of its size in Llama's form: RMS norms, rotary positions and SwiGLU,
which are chains of small operators. Each part runs in a separate process with one thread, which keeps its heap as ranks
do. It compiles from nothing: torch's cache and its precompiled headers are empty.

measured: a step with compiled blocks and one without, in turns, on the same samples, in CPU seconds of the process and
    of the compilers that it starts, which other load changes least. The gain of a step is the median over pairs, with
    its 95 % interval. The break-even number of steps is the time of compiling divided by the gain of a step.
calibrated: what `plan` knows of both plans after it has calibrated them, as often as asked for. priced: what it says
    before anything runs.

Where the interval of a gain includes none, compiling does not pay, and the break-even is "never".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import paceline as pl
from benchmarks.turns import ratio, run_command, warn_if_busy
from benchmarks.workload import EXAMPLE

WARM_UP_PAIRS = 3
PLANS = ("single", "single compile=blocks")
TIMEOUT_S = 7200.0


@dataclass(frozen=True, slots=True)
class Figures:
    """eager_s: of a step without compiled blocks. gain_s: of one with them, and its 95 % interval, where pairs of
    steps give one. start_s: of compiling, forward and backward."""

    eager_s: float
    gain_s: float
    low_s: float
    high_s: float
    start_s: float

    @property
    def break_even(self) -> float:
        """Steps after which compiling is paid back; infinite if it never is, for all that is sure.

        >>> Figures(0.5, 0.25, 0.2, 0.3, 30.0).break_even
        120.0
        """
        return self.start_s / self.gain_s if self.low_s > 0 else float("inf")


def the_job(form: str, batch: int) -> pl.Job:
    from benchmarks.models.decoder import Decoder
    from benchmarks.models.sizes import DecoderSize

    job = pl.load(str(EXAMPLE), {"batch": batch})
    if form == "gpt":
        return job
    size = DecoderSize(
        layers=4, hidden=256, heads=4, ffn=704, vocab=256, sequence=128, form="llama"
    )
    return replace(job, model=lambda: Decoder(size))


def cpu_s() -> float:
    """Of this process and of those it has started and waited for."""
    times = os.times()  # in hundredths; of the others that is fine enough
    return time.process_time() + times.children_user + times.children_system


def measured(job: pl.Job, pairs: int) -> Figures:
    """Steps in turns; the gain is the median of pairs."""
    import torch

    from paceline.launch.process.malloc import set_up_heap
    from paceline.strategies.compile import run as compile_run
    from paceline.strategies.mesh import Mesh
    from paceline.strategies.plan import Plan

    set_up_heap(keep=True)
    models = [job.model(), job.model()]
    optimizers = [job.optimizer(model.named_parameters()) for model in models]
    inputs, targets = (
        torch.stack(tensors)
        for tensors in zip(*(job.data[k] for k in range(job.batch)), strict=True)
    )
    plan = Plan.parse(PLANS[1])
    compile_run.prepare(models[True], plan=plan, mesh=Mesh(plan.axes.sizes(), 0))

    def step(*, on: bool) -> float:
        began_s = cpu_s()
        job.criterion(models[on](inputs), targets).backward()
        optimizers[on].step()
        optimizers[on].zero_grad()
        return cpu_s() - began_s

    step(on=False)
    first_s = step(on=True)
    taken = [(step(on=False), step(on=True)) for _ in range(WARM_UP_PAIRS + pairs)][WARM_UP_PAIRS:]
    eager_s, compiled_s = ([pair[k] for pair in taken] for k in (0, 1))
    of_one = ratio(compiled_s, eager_s)
    step_s = statistics.median(eager_s)
    low, high = (1.0 if end is None else end for end in (of_one.low, of_one.high))
    gain_s, low_s, high_s = (step_s * (1 - part) for part in (of_one.median, high, low))
    return Figures(step_s, gain_s, low_s, high_s, first_s - step_s)


def predicted(job: pl.Job, *, calibrating: bool) -> Figures:
    """What the planner says of one device with one thread."""
    from paceline.api.calibration import calibrate
    from paceline.cluster.cluster import Cluster
    from paceline.model.cost.trace import profile_job
    from paceline.planner.corrections import Corrections
    from paceline.planner.estimate import estimate
    from paceline.strategies.plan import Plan

    profile, cluster, known = profile_job(job), Cluster.local("cpu:0"), Corrections()
    plans = [Plan.parse(text) for text in PLANS]
    prices = {plan: estimate(profile, plan, cluster, batch=job.batch) for plan in plans}
    if calibrating:
        for plan in plans:
            known.add(plan, prices[plan], calibrate(job, cluster, plan, prices[plan].step_s))
        prices = {plan: known.apply(plan, prices[plan]) for plan in plans}
    eager, compiled = (prices[plan] for plan in plans)
    gain_s = eager.step_s - compiled.step_s
    return Figures(eager.step_s, gain_s, gain_s, gain_s, compiled.start_s)


PARTS: dict[str, Callable[[pl.Job, int], Figures]] = {
    "measured": measured,
    "calibrated": lambda job, pairs: predicted(job, calibrating=True),
    "priced": lambda job, pairs: predicted(job, calibrating=False),
}


def apart(part: str, options: argparse.Namespace) -> Figures:
    """A part in a process that finds nothing compiled."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as empty:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TMPDIR"] = empty
        output = run_command(
            [
                sys.executable,
                "-m",
                "benchmarks.compile",
                "--part",
                part,
                "--form",
                options.form,
                "--batch",
                str(options.batch),
                "--pairs",
                str(options.pairs),
            ],
            timeout_s=TIMEOUT_S,
        )
    return Figures(**json.loads(output.splitlines()[-1]))


def report(parts: Sequence[tuple[str, Figures]]) -> None:
    """For people."""
    print(
        f"{'':<10}{'step s':>8}{'gain ms (95 %)':>26}{'compiling s':>13}{'break-even steps':>24}{'off':>7}"
    )
    measured_steps = parts[0][1].break_even
    for name, figures in parts:
        gain_s, low_s, high_s, start_s = (
            figures.gain_s,
            figures.low_s,
            figures.high_s,
            figures.start_s,
        )
        gain, pays = f"{1e3 * gain_s:.1f} ({1e3 * low_s:.1f} to {1e3 * high_s:.1f})", "never"
        if low_s > 0:
            pays = f"{figures.break_even:.0f} ({start_s / high_s:.0f} to {start_s / low_s:.0f})"
        is_known = name != "measured" and max(measured_steps, figures.break_even) < float("inf")
        off = f"{figures.break_even / measured_steps - 1:+.0%}" if is_known else ""
        print(
            f"{name:<10}{figures.eager_s:>8.4f}{gain:>26}{figures.start_s:>13.1f}{pays:>24}{off:>7}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--form", choices=("gpt", "llama"), default="gpt", help="of the model")
    parser.add_argument("--pairs", type=int, default=100, help="steps of each kind")
    parser.add_argument("--batch", type=int, default=32, help="samples a step")
    parser.add_argument(
        "--calibrations", type=int, default=1, help="that are made, each from nothing"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(
            json.dumps(
                asdict(PARTS[options.part](the_job(options.form, options.batch), options.pairs))
            )
        )
        return
    warn_if_busy()
    parts = [
        (part, apart(part, options))
        for part in ("measured", *["calibrated"] * options.calibrations, "priced")
    ]
    if options.json:
        print(
            json.dumps(
                [
                    {"part": part, **asdict(figures), "break_even": figures.break_even}
                    for part, figures in parts
                ],
                indent=2,
            )
        )
        return
    report(parts)


if __name__ == "__main__":
    main()
