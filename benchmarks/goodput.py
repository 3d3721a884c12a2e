"""Predicted beside measured goodput of runs whose ranks are killed at random, by how they survive and how often.

    python -m benchmarks.goodput [--mtbf-s 6 12 24] [--ways NAME...] [--plan data=2] [--steps 9000] [--json]

Ranks are killed by SIGKILL, at times drawn from an exponential distribution, also while they start again. The draws
are stratified: each six of them have one from each sixth of the distribution, in random order, so that the number of
kills of a run is near that of its rate. The ways:
`copies` and `checkpoint` (the ranks are replaced and go on from copies in memory, or from the newest checkpoint) and
`resume` (--restarts 0, and the command is run again; while it has no ranks yet, it is killed itself).

The measured goodput is the time of the steps that lasted, as long as they took in that run, by the time from the run's
begin to its last step. So a machine whose speed changes from run to run does not change it. The prediction plays
launches that fail: the steps after which a launch's state can be gone on from are those of an undisturbed run, and the
time from a kill to the next applied step, where no other kill comes before it, is the mean of the way's runs with the
other rates, so that no run predicts itself. By chance a run still has more or fewer kills than its rate says. So there
is a second prediction, for the rate that came: the run's time by its kills.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect, bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.contenders.goodput.run import IN_MEMORY
from benchmarks.recovery import JOB, ranks_of
from benchmarks.turns import ROOT, ContenderFailed, warn_if_busy
from paceline.runs import folder
from paceline.runs.journal import Launch, Update, read

WAYS = ("copies", "checkpoint", "resume")
SAVE_EVERY = 100  # steps
LIMIT_S = 600.0
STRATA = 6
PLAYS = 1000


@dataclass(frozen=True, slots=True)
class Run:
    """A run, killed or not. trained_s: from where its first launch begins to train to its last step. useful_s: of that,
    the time of steps that lasted. num_kills: until then. restarts_s: from a kill to the next applied step, where no
    other kill came before it. endings_s: from a kill to the end of the launch, in which other kills change nothing.
    kept: the steps after which ranks could go on from memory, or from a checkpoint.
    measured: goodput, as is predicted, and as is predicted for the rate that came."""

    way: str
    mtbf_s: float
    trained_s: float
    useful_s: float
    num_kills: int
    restarts_s: tuple[float, ...]
    endings_s: tuple[float, ...]
    steps_recomputed: int
    kept: tuple[int, ...]
    measured: float = 1.0
    predicted: float = 1.0
    predicted_for_kills: float = 1.0


@dataclass
class Killer:
    """Kills ranks of a run, by whichever process it is trained just then. kills_s: when it did. of_ranks: those that
    hit one. ends_s: when launches ended. strata: of the distribution, that were not drawn from yet."""

    mtbf_s: float
    draws: random.Random
    kills_launcher: bool
    kills_s: list[float] = field(default_factory=list)
    of_ranks: set[float] = field(default_factory=set)
    ends_s: list[float] = field(default_factory=list)
    next_s: float = math.inf
    strata: list[int] = field(default_factory=list)

    def draw(self) -> None:
        """When the next failure comes."""
        if not self.strata:
            self.strata = self.draws.sample(range(STRATA), STRATA)
        part = (self.strata.pop() + self.draws.random()) / STRATA
        self.next_s = time.monotonic() - self.mtbf_s * math.log(1 - part)

    def look(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a rank if it is time; where there is none, the process that is about to start them, or the next one."""
        if time.monotonic() < self.next_s or process.poll() is not None:
            return
        ranks = ranks_of(process)
        if not ranks and not self.kills_launcher:
            return
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self.draws.choice(ranks) if ranks else process.pid).kill()
        self.kills_s.append(time.time())
        self.of_ranks |= {self.kills_s[-1]} if ranks else set()
        self.draw()


def trained(way: str, plan: str, steps: int, *, mtbf_s: float = math.inf, seed: int = 0) -> Run:
    """Train, and kill ranks meanwhile. A command that ends before its time is run again."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as where:
        run, killer = (
            Path(where) / "run",
            Killer(mtbf_s, random.Random(seed), kills_launcher=way == "resume"),
        )
        command = [
            sys.executable,
            "-m",
            "benchmarks.contenders.goodput.run",
            way,
            str(JOB),
            plan,
            str(steps),
            str(run),
            str(SAVE_EVERY),
        ]
        until_s = time.monotonic() + LIMIT_S
        while _launched(command, run, killer, until_s):
            pass
        return _figures(way, mtbf_s, run, killer)


def _launched(command: Sequence[str], run: Path, killer: Killer, until_s: float) -> int:
    """Run the command to its end, with kills from the first step of the run on. Returns its exit code."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            _wait(lambda: _num_steps(run) > 0 or process.poll() is not None, until_s)
            if killer.mtbf_s < math.inf and killer.next_s == math.inf:
                killer.draw()
            while process.poll() is None:
                killer.look(process)
                if time.monotonic() > until_s:
                    raise ContenderFailed(f"a run took longer than {LIMIT_S:g} s")
                time.sleep(0.005)
            killer.ends_s.append(time.time())
            return process.returncode
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _wait(is_so: Any, until_s: float) -> None:
    while not is_so():
        if time.monotonic() > until_s:
            raise ContenderFailed(f"a run took longer than {LIMIT_S:g} s")
        time.sleep(0.005)


def _num_steps(run: Path) -> int:
    path = run / folder.METRICS
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _figures(way: str, mtbf_s: float, run: Path, killer: Killer) -> Run:
    lines = [json.loads(line) for line in (run / folder.METRICS).read_text().splitlines()]
    journal = [record for _, record in read(run / folder.JOURNAL) if record is not None]
    launches = [record for record in journal if isinstance(record, Launch)]
    ends_s = sorted(line["time"] for line in lines if "step_s" in line)
    num_updates = sum(isinstance(record, Update) for record in journal)
    kills = [kill_s for kill_s in killer.kills_s if kill_s < ends_s[-1]]
    restarts_s = [next(end_s for end_s in ends_s if end_s > kill_s) - kill_s for kill_s in kills]
    lone_s = [
        restart_s
        for kill_s, restart_s, later_s in zip(
            kills, restarts_s, [*kills, math.inf][1:], strict=True
        )
        if kill_s + restart_s < later_s and kill_s in killer.of_ranks
    ]
    kept = tuple(range(SAVE_EVERY, len(ends_s) + 1, SAVE_EVERY))
    if way == "copies":
        kept = tuple(sorted(set(map(int, (run / IN_MEMORY).read_text().split()))))
    began_s = launches[0].time
    useful_s = _useful_s([began_s, *ends_s], [launch.time for launch in launches[1:]])
    return Run(
        way,
        mtbf_s,
        ends_s[-1] - began_s,
        useful_s,
        len(kills),
        tuple(lone_s),
        _endings_s(killer),
        num_updates - len(ends_s),
        kept,
        useful_s / (ends_s[-1] - began_s),
    )


def _endings_s(killer: Killer) -> tuple[float, ...]:
    """From the first kill of a rank of each launch that was ended by it to the launch's end."""
    return tuple(
        end_s - min(kills)
        for before_s, end_s in pairwise((0.0, *killer.ends_s[:-1]))
        if (kills := [kill_s for kill_s in killer.of_ranks if before_s < kill_s < end_s])
    )


def _useful_s(ends_s: Sequence[float], launches_s: Sequence[float]) -> float:
    """The time of the steps that ended then. A step before which ranks were started again took as long as most."""
    took_s = [b - a for a, b in pairwise(ends_s) if bisect(launches_s, a) == bisect(launches_s, b)]
    return sum(took_s) + (len(ends_s) - 1 - len(took_s)) * statistics.median(took_s)


def predicted(
    run: Run, undisturbed: Run, steps: int, others: Sequence[Run], *, mtbf_s: float
) -> float:
    """Launches that fail as often, played: from what an undisturbed one keeps, and the way's runs with other rates."""
    step_s, draws = run.useful_s / steps, random.Random(0)
    ending_s = statistics.fmean([second for other in others for second in other.endings_s] or [0.0])
    start_s = statistics.fmean(second for other in others for second in other.restarts_s) - ending_s
    passed_s = sum(
        _played_s(steps, step_s, (ending_s, start_s), undisturbed.kept, mtbf_s, draws)
        for _ in range(PLAYS)
    )
    return PLAYS * steps * step_s / passed_s


def _played_s(
    steps: int,
    step_s: float,
    restart_s: tuple[float, float],
    kept: Sequence[int],
    mtbf_s: float,
    draws: random.Random,
) -> float:
    """Seconds of one run. restart_s: until what failed has ended, and from then to the next step."""
    ending_s, start_s = restart_s
    done, passed_s = 0, 0.0
    while True:
        fails_s = draws.expovariate(1 / mtbf_s)
        if fails_s >= (steps - done) * step_s:
            return passed_s + (steps - done) * step_s
        taken = int(fails_s / step_s)
        done += kept[place - 1] if (place := bisect_right(kept, taken)) else 0
        passed_s += fails_s + ending_s
        while (again_s := draws.expovariate(1 / mtbf_s)) < start_s:
            passed_s += again_s
        passed_s += start_s


def main(
    rates_s: Sequence[float], ways: Sequence[str], plan: str, steps: int, *, as_json: bool
) -> None:
    warn_if_busy()
    rows: list[Run] = []
    for way in ways:
        undisturbed = trained(way, plan, steps)
        print(
            f"{way}: undisturbed {undisturbed.trained_s:.1f} s, with {len(undisturbed.kept)} steps to go back to",
            file=sys.stderr,
        )
        runs = []
        for seed, mtbf_s in enumerate(rates_s):
            run = trained(way, plan, steps, mtbf_s=mtbf_s, seed=seed)
            runs.append(run)
            print(
                f"{way}: a kill every {mtbf_s:g} s, {run.num_kills} kills, {run.trained_s:.1f} s",
                file=sys.stderr,
            )
        for run in runs:
            others = [other for other in runs if other is not run]
            came_s = run.trained_s / run.num_kills if run.num_kills else 1e9
            rows.append(
                replace(
                    run,
                    predicted=predicted(run, undisturbed, steps, others, mtbf_s=run.mtbf_s),
                    predicted_for_kills=predicted(run, undisturbed, steps, others, mtbf_s=came_s),
                )
            )
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print(
        f"{'way':12} mtbf s  kills  s to the next step  steps again  measured  predicted  error  "
        "for the kills  error"
    )
    for row in rows:
        restart_s = statistics.fmean(row.restarts_s or [0])
        print(
            f"{row.way:12} {row.mtbf_s:6.1f}  {row.num_kills:5}  {restart_s:18.2f}  "
            f"{row.steps_recomputed:11}  {row.measured:8.3f}  "
            f"{row.predicted:9.3f}  {100 * (row.predicted / row.measured - 1):+3.0f} %  "
            f"{row.predicted_for_kills:13.3f}  {100 * (row.predicted_for_kills / row.measured - 1):+3.0f} %"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mtbf-s", nargs="+", type=float, default=(6.0, 12.0, 24.0))
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--plan", default="data=2")
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(sys.argv[1:])
    main(options.mtbf_s, options.ways, options.plan, options.steps, as_json=options.json)
