"""How near a plan's predicted time and memory are to what is measured here, and how good the chosen plan is.

Every plan of every job is priced, without calibrations and with them, then trained in turns; regret is the time of the
chosen plan by the best one's. Runs wait until the machine is as fast as usual, and one beside which it became slower
is taken again.

    python -m benchmarks.regret [--jobs NAME...] [--plans 20] [--rounds 3] [--seconds 2] [--calibrate 10]
                                [--json FILE] [--write docs/accuracy.md]

--json keeps what was measured, job by job: those that are there and are not named are not measured again. Rates and
trials start from an empty cache.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.regret.held_out import HELD_OUT_JOBS
from benchmarks.regret.jobs import JOBS
from benchmarks.regret.pace import Pace
from benchmarks.turns import warn_if_busy
from paceline import Job
from paceline.api.calibration import TRY_S
from paceline.api.planning import plan
from paceline.api.planning_table import Answer
from paceline.base.errors import PacelineError
from paceline.cluster.limits import usable_cores
from paceline.launch.local.ranks import run_local
from paceline.launch.process.failure import RankFailed
from paceline.planner.rank_kinds import devices_of
from paceline.planner.resolve import resolve
from paceline.planner.search import Candidate
from paceline.strategies.compose import load
from paceline.training.drivers import fault_policy, train_rank
from paceline.training.settings import Settings

CASES = {**JOBS, **HELD_OUT_JOBS}
MOST_PLANS = 20  # of a job
MOST_TIMES = 8  # the fastest plan's step, as predicted: a plan with steps of 20 s would take most of the time
MOST_TRIES = 4  # of a run, on a machine that is slower at its end than usual
WARM_UP_STEPS = 10  # that a run leaves out of its speed


@dataclass(slots=True)
class Measured:
    """A plan of a job. alone_s, alone_low_s, alone_high_s, alone_breakdown: predicted without calibrations. step_s,
    memory_bytes: of each round."""

    plan: str
    predicted_s: float
    low_s: float
    high_s: float
    predicted_bytes: int
    breakdown: dict[str, float]
    ledger: dict[str, int]
    is_relaxed: bool
    was_tried: bool
    step_s: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    failed: str = ""
    alone_s: float = math.nan
    alone_low_s: float = math.nan
    alone_high_s: float = math.nan
    alone_breakdown: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, candidate: Candidate, alone: Candidate | None = None) -> Measured:
        estimate = candidate.estimate
        measured = cls(
            str(candidate.plan),
            estimate.step_s,
            estimate.low_s,
            estimate.high_s,
            estimate.peak_memory_bytes,
            dict(estimate.breakdown),
            dict(estimate.ledger),
            candidate.plan.relaxed is not None,
            estimate.is_measured,
        )
        if alone is None:
            return measured
        before = alone.estimate
        return replace(
            measured,
            alone_s=before.step_s,
            alone_low_s=before.low_s,
            alone_high_s=before.high_s,
            alone_breakdown=dict(before.breakdown),
        )

    @property
    def time_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.time_s - 1

    @property
    def memory_error(self) -> float:
        """nan where it was not measured."""
        return (
            math.nan
            if not self.memory_bytes
            else self.predicted_bytes / statistics.median(self.memory_bytes) - 1
        )

    @property
    def alone_error(self) -> float:
        """Of the time that is predicted without calibrations."""
        return self.alone_s / self.time_s - 1

    @property
    def is_inside(self) -> bool:
        return self.low_s <= self.time_s <= self.high_s

    @property
    def is_inside_alone(self) -> bool:
        return self.alone_low_s <= self.time_s <= self.alone_high_s

    @property
    def noise(self) -> float:
        """How far apart two rounds of the same plan are, as a part: the median; nan of one round."""
        apart = [abs(a / b - 1) for a, b in itertools.combinations(self.step_s, 2)]
        return statistics.median(apart) if apart else math.nan


@dataclass(slots=True)
class JobResult:
    """What a job gave. chosen, chosen_alone: the plan that is chosen with calibrations, and without."""

    chosen: str
    plans: list[Measured]
    chosen_alone: str = ""

    @property
    def run(self) -> list[Measured]:
        return [measured for measured in self.plans if measured.step_s]

    def regret(self, plan: str) -> float:
        """A plan's time by the best exact one's; nan where it was not measured."""
        time_s = next((measured.time_s for measured in self.run if measured.plan == plan), math.nan)
        return time_s / min(measured.time_s for measured in self.run if not measured.is_relaxed)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    warn_if_busy()
    results, pace = _kept_results(options.json), Pace()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        _measure_all(options, results, pace)
    print(table(results))
    if options.write:
        Path(options.write).write_text(
            page(results, measured_on=datetime.date.today(), machine=_machine())
        )


def _measure_all(options: argparse.Namespace, results: dict[str, JobResult], pace: Pace) -> None:
    """Add the results of the jobs that are asked for."""
    for name in options.jobs or [name for name in JOBS if name not in results]:
        with _threads(CASES[name].threads):
            results[name] = _measure(name, options, pace)
        print(_job_table(name, results[name]), flush=True)
        if options.json:
            Path(options.json).write_text(
                json.dumps({name: asdict(result) for name, result in results.items()}, indent=1)
            )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """What users set to give each rank so many cores."""
    before = os.environ.get("OMP_NUM_THREADS")
    if count is not None:
        os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        if count is not None:
            os.environ.pop("OMP_NUM_THREADS")
            if before is not None:
                os.environ["OMP_NUM_THREADS"] = before


def _kept_results(path: str | None) -> dict[str, JobResult]:
    if not path or not Path(path).exists():
        return {}
    kept = json.loads(Path(path).read_text())
    return {
        name: JobResult(
            result["chosen"], [Measured(**plan) for plan in result["plans"]], result["chosen_alone"]
        )
        for name, result in kept.items()
    }


def _machine() -> str:
    """In words."""
    import torch

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        f"{usable_cores()} cores ({torch.backends.cpu.get_cpu_capability()}), {memory_bytes / 2**30:.0f} GiB, "
        f"{sys.platform}, torch {torch.__version__}"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regret")
    parser.add_argument(
        "--jobs",
        nargs="+",
        choices=list(CASES),
        metavar="NAME",
        help="by default those of jobs.py; those of held_out.py when they are named",
    )
    parser.add_argument("--plans", type=int, default=MOST_PLANS, help="of a job, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="of a turn, as far as the prediction is right"
    )
    parser.add_argument("--calibrate", type=float, default=TRY_S, metavar="SECONDS")
    parser.add_argument("--json")
    parser.add_argument("--write", metavar="FILE", help="a page of all results")
    return parser.parse_args(arguments)


def _measure(name: str, options: argparse.Namespace, pace: Pace) -> JobResult:
    """Its plans, with what they took."""
    case = CASES[name]
    job, cluster = case.make(), case.cluster
    pace.wait_until_usual()
    before = plan(job, cluster, calibrate_s=0)
    pace.wait_until_usual()
    answer = plan(job, cluster, calibrate_s=options.calibrate) if options.calibrate else before
    alone = {candidate.plan: candidate for candidate in before.ranking.ranked}
    taken = [
        Measured.of(candidate, alone.get(candidate.plan))
        for candidate in _plans_to_run(answer, before, options.plans)
    ]
    for number in range(options.rounds):
        order = list(taken)
        random.Random(number).shuffle(order)
        for measured in order:
            for _ in range(MOST_TRIES):
                pace.wait_until_usual()
                if measured.failed or _run(
                    measured, job, case.memory, options.seconds, is_steady=pace.is_usual
                ):
                    break
        print(f"{name}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return JobResult(str(answer.chosen), taken, str(before.chosen))


def _plans_to_run(answer: Answer, before: Answer, most: int) -> list[Candidate]:
    """Exact plans: those that are chosen, and those with the fewest words, so that predictions don't say
    which; but none that looks far slower than the fastest."""
    exact = [candidate for candidate in answer.ranking.ranked if candidate.plan.relaxed is None]
    fastest_s = min(candidate.estimate.step_s for candidate in exact)
    exact = [
        candidate for candidate in exact if candidate.estimate.step_s <= MOST_TIMES * fastest_s
    ]
    chosen = [candidate for candidate in exact if candidate.plan in (answer.chosen, before.chosen)]
    others = [candidate for candidate in exact if candidate not in chosen]
    return [*chosen, *sorted(others, key=lambda each: (len(each.plan.values()), str(each.plan)))][
        :most
    ]


def _run(
    measured: Measured,
    job: Job,
    memory: str | None,
    seconds: float,
    *,
    is_steady: Callable[[], bool] = lambda: True,
) -> bool:
    """Train as `paceline train` does after it has chosen a plan, without a prediction beside it.

    Returns:
        Whether it counts: it does not if the machine is not steady at its end.
    """
    request = resolve(job, measured.plan, memory=memory)
    short = replace(
        job, steps=WARM_UP_STEPS + max(WARM_UP_STEPS, round(seconds / measured.predicted_s))
    )
    load(request.plan)
    try:
        with tempfile.TemporaryDirectory() as run:
            settings = Settings(
                run_dir=Path(run),
                shares=request.shares,
                devices=devices_of(request.plan, request.cluster),
            )
            (Path(run) / "checkpoints").mkdir()
            summary = run_local(
                lambda rank: train_rank(rank, short, request.plan, settings),
                request.cluster.devices,
                run_dir=Path(run),
                fault_policy=fault_policy(request.plan),
            )[0]
    except PacelineError as error:
        if isinstance(error, RankFailed) and error.failure.is_stop:
            raise  # the benchmark itself was asked to stop
        measured.failed = str(error).partition("\n")[0]
        print(f"{measured.plan}: {measured.failed}", file=sys.stderr)
        return True
    if not is_steady():
        return False
    measured.step_s.append(job.batch / summary["samples_per_s"])
    measured.memory_bytes.append(summary["peak_memory_bytes"])
    return True


def _job_table(name: str, result: JobResult) -> str:
    titles = (
        f"{'ms':>8} {'alone':>8} {'off':>6} {'predicted':>9} {'off':>6} {'noise':>6} {'MiB':>7} "
        f"{'predicted':>9} {'off':>6}"
    )
    lines = [
        f"\n{name}, {CASES[name].num_devices} devices; chosen: {result.chosen}",
        f"{'plan':<58} {titles}",
    ]
    for measured in sorted(result.run, key=lambda measured: measured.time_s):
        memory_bytes = statistics.median(measured.memory_bytes)
        times = (
            f"{1e3 * measured.time_s:>8.2f} {1e3 * measured.alone_s:>8.2f} {100 * measured.alone_error:>+5.0f}% "
            f"{1e3 * measured.predicted_s:>9.2f} {100 * measured.time_error:>+5.0f}% "
            f"{100 * measured.noise:>5.0f}%"
        )
        memory = (
            f"{memory_bytes / 2**20:>7.1f} {measured.predicted_bytes / 2**20:>9.1f} "
            f"{100 * measured.memory_error:>+5.0f}%"
        )
        marks = (
            f"{' tried' if measured.was_tried else ''}{'' if measured.is_inside else ' outside'}"
        )
        lines.append(f"{measured.plan:<58} {times} {memory}{marks}")
    lines += [f"{measured.plan}: {measured.failed}" for measured in result.plans if measured.failed]
    return "\n".join(lines)


def table(results: dict[str, JobResult]) -> str:
    """A line a job: how far off time is without calibrations, of plans that were not tried and of all, and memory; how
    many are inside their intervals, and those's width; the chosen plan's time by the best one's; how far apart rounds
    are."""
    titles = (
        "plans",
        "alone",
        "inside",
        "untried",
        "time",
        "memory",
        "inside",
        "width",
        "regret",
        "noise",
    )
    lines = [f"\n{'job':<22} {' '.join(f'{title:>6}' for title in titles)}"]
    for name, job in results.items():
        lines.append(
            f"{_scores(name, job.run)} {job.regret(job.chosen):>6.3f} "
            f"{_percent(_mean(each.noise for each in job.run)):>6}"
        )
    return "\n".join(
        [*lines, _scores("all", [each for job in results.values() for each in job.run])]
    )


def _scores(name: str, run: Sequence[Measured]) -> str:
    untried = [abs(measured.time_error) for measured in run if not measured.was_tried]
    return (
        f"{name:<22} {len(run):>6} {_percent(_mean(abs(measured.alone_error) for measured in run)):>6} "
        f"{_percent(_mean(measured.is_inside_alone for measured in run)):>6} {_percent(_mean(untried)):>6} "
        f"{_percent(_mean(abs(measured.time_error) for measured in run)):>6} "
        f"{_percent(_mean(abs(measured.memory_error) for measured in run)):>6} "
        f"{_percent(_mean(measured.is_inside for measured in run)):>6} "
        f"{_percent(statistics.median(measured.high_s / measured.low_s - 1 for measured in run)):>6}"
    )


def page(results: dict[str, JobResult], *, measured_on: datetime.date, machine: str) -> str:
    """The report, as Markdown."""
    run = [measured for job in results.values() for measured in job.run]
    columns = [
        "job",
        "plans",
        "alone: median",
        "worst",
        "inside",
        "regret",
        "calibrated: median",
        "worst",
        "inside",
        "regret",
        "memory: median",
    ]
    lines = [
        "# How near predictions are",
        "",
        "Written by `python -m benchmarks.regret --write docs/accuracy.md`: each plan is predicted without",
        '("alone") and with calibrations, then trained. "off" is predicted by measured, less 1; "inside" is the',
        "part of plans that took a time inside their 80 % interval; regret is the chosen plan's time by the",
        "fastest one's. Runs wait until the machine is as fast as usual.",
        "",
        f"{measured_on:%d %B %Y}; {machine}.",
        "",
        *_head(columns),
    ]
    for name, job in results.items():
        lines.append(
            _page_row(
                name,
                job.run,
                f"{job.regret(job.chosen_alone):.3f}",
                f"{job.regret(job.chosen):.3f}",
            )
        )
    lines += [
        _page_row(
            "all",
            run,
            *(
                f"{_mean(job.regret(getattr(job, which)) for job in results.values()):.3f}"
                for which in ("chosen_alone", "chosen")
            ),
        ),
        "",
    ]
    for name, job in results.items():
        lines += [
            f"## {name}",
            "",
            f"Chosen alone: {job.chosen_alone}. Chosen with calibrations: {job.chosen}.",
            "",
            *_head(["plan", "ms", "alone", "off", "calibrated", "off", "MiB", "predicted", "off"]),
        ]
        for measured in sorted(job.run, key=lambda measured: measured.time_s):
            cells = (
                measured.plan,
                f"{1e3 * measured.time_s:.1f}",
                f"{1e3 * measured.alone_s:.1f}",
                f"{100 * measured.alone_error:+.0f} %",
                f"{1e3 * measured.predicted_s:.1f}",
                f"{100 * measured.time_error:+.0f} %{', tried' if measured.was_tried else ''}",
                f"{statistics.median(measured.memory_bytes) / 2**20:.0f}",
                f"{measured.predicted_bytes / 2**20:.0f}",
                f"{100 * measured.memory_error:+.0f} %",
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _head(columns: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]


def _page_row(name: str, run: Sequence[Measured], regret_alone: str, regret: str) -> str:
    def errors(figures: Iterable[float]) -> str:
        by_magnitude = sorted((abs(figure), figure) for figure in figures)
        return f"{100 * statistics.median(size for size, _ in by_magnitude):.1f} % | {100 * by_magnitude[-1][1]:+.0f} %"

    return (
        f"| {name} | {len(run)} | {errors(measured.alone_error for measured in run)} | "
        f"{_percent(_mean(measured.is_inside_alone for measured in run))} | {regret_alone} | "
        f"{errors(measured.time_error for measured in run)} | "
        f"{_percent(_mean(measured.is_inside for measured in run))} | {regret} | "
        f"{100 * statistics.median(abs(measured.memory_error) for measured in run):.1f} % |"
    )


def _mean(figures: Iterable[float]) -> float:
    """nan of none."""
    values = list(figures)
    return statistics.fmean(values) if values else math.nan


def _percent(part: float) -> str:
    return f"{100 * part:.1f}%"


if __name__ == "__main__":
    main()
