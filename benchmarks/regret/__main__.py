"""How near a plan's predicted time and memory are to what is measured here, and how good the chosen plan is.

Every plan of every job is priced, then trained in turns; regret is the chosen plan's time by the best one's.

    python -m benchmarks.regret [--jobs NAME...] [--rounds 3] [--seconds 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.regret.jobs import JOBS
from benchmarks.turns import warn_if_busy
from paceline import Cluster, Job
from paceline.errors import PacelineError
from paceline.launch.failure import RankFailed
from paceline.launch.local import run_local
from paceline.planner.estimate import devices_of
from paceline.planner.rank import Candidate
from paceline.planner.resolve import resolve
from paceline.runtime.drivers import fault_policy, train_rank
from paceline.runtime.loop import Settings
from paceline.strategies.compose import load
from paceline.verbs.planning import Answer, plan

MOST_PLANS = 20  # of a job
REHEARSE_S = 120.0  # enough for a plan of each kind, and some far from those
WARM_UP_STEPS = 10  # that a run leaves out of its speed


@dataclass(slots=True)
class Measured:
    """A plan of a job. step_s, memory_bytes: of each round."""

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

    @classmethod
    def of(cls, one: Candidate) -> Measured:
        found = one.estimate
        return cls(str(one.plan), found.step_s, found.low_s, found.high_s, found.peak_memory_bytes,
                   dict(found.breakdown), dict(found.ledger), one.plan.relaxed is not None,
                   found.is_measured)

    @property
    def time_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.time_s - 1

    @property
    def memory_error(self) -> float:
        """nan where it was not measured."""
        return math.nan if not self.memory_bytes else self.predicted_bytes / statistics.median(self.memory_bytes) - 1

    @property
    def is_inside(self) -> bool:
        return self.low_s <= self.time_s <= self.high_s

    @property
    def noise(self) -> float:
        """How far apart two rounds of the same plan are, as a part: the median; nan of one round."""
        apart = [abs(a / b - 1) for a, b in itertools.combinations(self.step_s, 2)]
        return statistics.median(apart) if apart else math.nan


def main(arguments: Sequence[str] | None = None) -> None:
    asked = _arguments(arguments)
    warn_if_busy()
    found = {}
    for name in asked.jobs:
        found[name] = _measure(name, rounds=asked.rounds, seconds=asked.seconds)
        print(_job_table(name, *found[name]), flush=True)
    print(table(found))
    if asked.json:
        Path(asked.json).write_text(json.dumps({name: {"chosen": chosen, "plans": list(map(asdict, plans))}
                                                for name, (chosen, plans) in found.items()}, indent=1))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regret")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn, as far as the prediction is right")
    parser.add_argument("--json")
    return parser.parse_args(arguments)


def _measure(name: str, *, rounds: int, seconds: float) -> tuple[str, list[Measured]]:
    """The plan that is chosen, and all plans with what they took."""
    devices, make = JOBS[name]
    job = make()
    answer = plan(job, Cluster.local(f"cpu:0-{devices - 1}"), rehearse_s=REHEARSE_S)
    taken = [Measured.of(one) for one in _kept(answer)]
    for number in range(rounds):
        order = list(taken)
        random.Random(number).shuffle(order)
        for one in order:
            if not one.failed:
                _run(one, job, seconds)
        print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return str(answer.chosen), taken


def _kept(answer: Answer) -> list[Candidate]:
    """Exact plans: those with the fewest words, so that predictions don't say which, and the chosen one."""
    exact = [one for one in answer.ranking.ranked if one.plan.relaxed is None]
    kept = sorted(exact, key=lambda one: (len(one.plan.values()), str(one.plan)))[:MOST_PLANS]
    chosen = answer.ranking.chosen
    return kept if chosen is None or chosen in kept else [*kept[:-1], chosen]


def _run(one: Measured, job: Job, seconds: float) -> None:
    """Train as `paceline train` does after it has chosen a plan, without a prediction beside it."""
    asked = resolve(job, one.plan)
    short = replace(job, steps=WARM_UP_STEPS + max(WARM_UP_STEPS, round(seconds / one.predicted_s)))
    load(asked.plan)
    try:
        with tempfile.TemporaryDirectory() as run:
            settings = Settings(run_dir=Path(run), shares=asked.shares, devices=devices_of(asked.plan, asked.cluster))
            (Path(run) / "checkpoints").mkdir()
            summary = run_local(lambda rank: train_rank(rank, short, asked.plan, settings), asked.cluster.devices,
                                run_dir=Path(run), fault_policy=fault_policy(asked.plan))[0]
    except PacelineError as error:
        if isinstance(error, RankFailed) and error.failure.is_stop:
            raise  # the benchmark itself was asked to stop
        one.failed = str(error).partition("\n")[0]
        print(f"{one.plan}: {one.failed}", file=sys.stderr)
        return
    one.step_s.append(job.batch / summary["samples_per_s"])
    one.memory_bytes.append(summary["peak_memory_bytes"])


def _job_table(name: str, chosen: str, plans: Sequence[Measured]) -> str:
    lines = [f"\n{name}, {JOBS[name][0]} devices; chosen: {chosen}",
             f"{'plan':<58} {'ms':>8} {'said':>8} {'off':>6} {'noise':>6} {'MiB':>7} {'said':>7} {'off':>6}"]
    for one in sorted((one for one in plans if one.step_s), key=lambda one: one.time_s):
        lines.append(f"{one.plan:<58} {1e3 * one.time_s:>8.2f} {1e3 * one.predicted_s:>8.2f} "
                     f"{100 * one.time_error:>+5.0f}% {100 * one.noise:>5.0f}% "
                     f"{statistics.median(one.memory_bytes) / 2**20:>7.1f} {one.predicted_bytes / 2**20:>7.1f} "
                     f"{100 * one.memory_error:>+5.0f}%{' tried' if one.was_tried else ''}"
                     f"{'' if one.is_inside else ' outside'}")
    lines += [f"{one.plan}: {one.failed}" for one in plans if one.failed]
    return "\n".join(lines)


def table(found: dict[str, tuple[str, list[Measured]]]) -> str:
    """A line a job: how far off time is, of plans that were not tried and of all, and memory; how many are inside their
    intervals, and those's width; the chosen plan's time by the best one's; how far apart rounds are."""
    lines = [f"\n{'job':<20} {'plans':>5} {'untried':>7} {'time':>6} {'memory':>6} {'inside':>6} {'width':>6} "
             f"{'regret':>6} {'noise':>6}"]
    everything: list[Measured] = []
    for name, (chosen, plans) in found.items():
        run = [one for one in plans if one.step_s]
        everything += run
        best = min(one.time_s for one in run if not one.is_relaxed)
        ours = next((one for one in run if one.plan == chosen), None)
        regret = f"{ours.time_s / best:.3f}" if ours else "-"
        lines.append(f"{_scores(name, run)} {regret:>6} {_percent(_mean(one.noise for one in run)):>6}")
    return "\n".join([*lines, _scores("all", everything)])


def _scores(name: str, run: Sequence[Measured]) -> str:
    untried = [abs(one.time_error) for one in run if not one.was_tried]
    return (f"{name:<20} {len(run):>5} {_percent(_mean(untried)):>7} "
            f"{_percent(_mean(abs(one.time_error) for one in run)):>6} "
            f"{_percent(_mean(abs(one.memory_error) for one in run)):>6} "
            f"{_percent(_mean(one.is_inside for one in run)):>6} "
            f"{_percent(statistics.median(one.high_s / one.low_s - 1 for one in run)):>6}")


def _mean(figures: Iterable[float]) -> float:
    """nan of none."""
    held = list(figures)
    return statistics.fmean(held) if held else math.nan


def _percent(part: float) -> str:
    return f"{100 * part:.1f}%"


if __name__ == "__main__":
    main()
