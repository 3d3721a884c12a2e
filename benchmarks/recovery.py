"""Seconds from the death of a rank to the next applied step, by kind of plan, and what was computed again.

A rank is killed by SIGKILL in the middle of a run. The weights at the end are compared bit by bit with those of an
undisturbed run. Beside it, torchrun starts a hand-written loop again that saves a checkpoint every few steps.

    python -m benchmarks.recovery [--rounds 3] [--plans PLAN...] [--steps 300] [--width 128] [--json]

Layers of width 128 make steps of some 10 ms, of which copies in memory are many steps apart. Of width 2048, with a
state of 1.2 GB, steps take seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.turns import (
    ROOT,
    ContenderFailed,
    Record,
    document,
    measure,
    paceline,
    torchrun,
    warn_if_busy,
)
from paceline.strategies.plan import Plan

JOB = ROOT / "benchmarks" / "contenders" / "recovery" / "blocks.py"
PLANS = (
    "single",
    "data=2",
    "shard=2",
    "pipeline=2 microbatches=4",
    "tensor=2",
    "data=2 local=4",
    "servers=1 workers=2",
    "servers=1 workers=2 staleness=2",
)
TORCHRUN = "torchrun --max-restarts"
SAVE_EVERY = 20  # steps, of the hand-written loop
KILLED_AFTER = 0.5  # of the steps
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """What one killed run did. first_step_s: from the kill to the first step that was applied after it; new_step_s: to
    the first one that had not been applied before."""

    first_step_s: float
    new_step_s: float
    steps_recomputed: int
    steps_missing: int
    has_equal_weights: bool | None


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Process numbers of the ranks: the children of a launcher's only child with children, or the launcher's own."""
    children = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)
    for child in children:
        if forks := sorted(fork.pid for fork in child.children()):
            return forks
    return [child.pid for child in children]


def _killed(command: Sequence[str], metrics: Path, *, after: int, log: Path) -> tuple[float, int]:
    """Run a command and kill its last rank after so many steps. Returns when, and the last step until then."""
    # Without the last one, gloo under torchrun (torch 2.13) reads the addresses of the ranks before it started them
    # again, from a store that both share, and gives up.
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            until_s = time.monotonic() + LIMIT_S
            while (last := max(map(_step, _steps(metrics)), default=0)) < after:
                if process.poll() is not None or time.monotonic() > until_s:
                    raise ContenderFailed(log.read_text()[-500:])
                time.sleep(0.002)
            # At any moment of the next step: its record is written at its end.
            time.sleep(random.random() * (_steps(metrics)[-1].get("step_s") or 0.0))
            last = max(map(_step, _steps(metrics)))
            killed_s = time.time()
            os.kill(ranks_of(process)[-1], signal.SIGKILL)
            if process.wait(LIMIT_S):
                raise ContenderFailed(log.read_text()[-500:])
        except subprocess.TimeoutExpired as error:
            raise ContenderFailed(f"it did not go on: {log.read_text()[-500:]}") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return killed_s, last


def _steps(metrics: Path) -> list[dict[str, Any]]:
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if "loss" in record or "pid" in record]


def _step(record: dict[str, Any]) -> int:
    return int(record["step"])


def _digest(model: Path) -> str:
    return hashlib.sha256(model.read_bytes()).hexdigest()


def _with_paceline(plan: str, steps: int, width: int, undisturbed: dict[str, str]) -> Run:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        run, whole = Path(folder) / "run", Path(folder) / "whole"
        words = (
            "train",
            str(JOB),
            "--plan",
            plan,
            "--set",
            f"steps={steps}",
            "--set",
            f"width={width}",
            "--run",
        )
        if plan not in undisturbed:
            subprocess.run(
                paceline(*words, str(whole)),
                check=True,
                capture_output=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            )
            undisturbed[plan] = _digest(whole / "model.safetensors")
        killed_s, last = _killed(
            paceline(*words, str(run)),
            run / "metrics.jsonl",
            after=int(KILLED_AFTER * steps),
            log=Path(folder) / "log",
        )
        # What ranks did before they were ended is in the journal alone: metrics.jsonl has each step once.
        journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        begins = [number for number, line in enumerate(journal) if "after" in line]
        applied = again_from = last  # where the lost rank was replaced alone, the others went on
        if len(begins) > 1:
            applied = max(
                [line["step"] for line in journal[: begins[1]] if "step" in line] or [last]
            )
            again_from = journal[begins[1]]["after"]
        is_comparable = not getattr(
            Plan.parse(plan).sync, "staleness", 0
        )  # with staleness, no two runs are alike
        return _figures(
            _steps(run / "metrics.jsonl"),
            killed_s,
            steps,
            applied=applied,
            again_from=again_from,
            has_equal_weights=_digest(run / "model.safetensors") == undisturbed[plan]
            if is_comparable
            else None,
        )


def _torchrun(steps: int, width: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        words = (
            folder,
            "--steps",
            str(steps),
            "--save-every",
            str(SAVE_EVERY),
            "--width",
            str(width),
        )
        command = torchrun("benchmarks.contenders.recovery.checkpointing", *words)
        command[command.index("--standalone") : command.index("--standalone")] = [
            "--max-restarts",
            "3",
        ]
        metrics = Path(folder) / "metrics.jsonl"
        half_way = (
            int(KILLED_AFTER * steps) // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY // 2
        )  # between two saves
        killed_s, last = _killed(command, metrics, after=half_way, log=Path(folder) / "log")
        records = _steps(metrics)
        later = [record for record in records if record["pid"] != records[0]["pid"]]
        applied = max(_step(record) for record in records if record["pid"] == records[0]["pid"])
        return _figures(
            later,
            killed_s,
            steps,
            applied=max(applied, last),
            again_from=_step(later[0]) - 1,
            has_equal_weights=None,
        )


def _figures(
    records: Sequence[dict[str, Any]],
    killed_s: float,
    steps: int,
    *,
    applied: int,
    again_from: int,
    has_equal_weights: bool | None,
) -> Run:
    """applied: the last step before the new ranks began, after the step `again_from`."""
    after = {
        _step(record): record["time"] - killed_s for record in records if record["time"] > killed_s
    }
    return Run(
        after[again_from + 1],
        after[min(applied + 1, max(after))],
        applied - again_from,
        len(set(range(again_from + 1, steps + 1)) - set(after)),
        has_equal_weights,
    )


def _say(run: Run) -> str:
    weights = {True: "equal weights", False: "OTHER WEIGHTS", None: ""}[run.has_equal_weights]
    return (
        f"{run.first_step_s:.2f} s to the first step, {run.new_step_s:.2f} s to a new one, "
        f"{run.steps_recomputed} steps again, {run.steps_missing} missing {weights}"
    )


def main(rounds: int, plans: Sequence[str], steps: int, width: int, *, as_json: bool) -> None:
    warn_if_busy()
    undisturbed: dict[str, str] = {}
    contenders: dict[str, tuple[str, Callable[[], Run]]] = {
        plan: ("paceline", partial(_with_paceline, plan, steps, width, undisturbed))
        for plan in plans
    }
    contenders[TORCHRUN] = "torch", partial(_torchrun, steps, width)
    records: dict[str, Record[Run]] = measure(contenders, rounds=rounds, say=_say)
    if as_json:
        print(json.dumps(document(records, {}), indent=1))
        return
    print(f"{'plan':28} first step s  new step s  steps again  missing  weights")
    for name, record in records.items():
        if record.skipped:
            print(f"{name:28} {record.skipped}")
            continue
        weights = (
            "-"
            if record.runs[0].has_equal_weights is None
            else ("equal" if all(run.has_equal_weights for run in record.runs) else "DIFFER")
        )
        print(
            f"{name:28} {record.median('first_step_s'):12.2f}  {record.median('new_step_s'):10.2f}  "
            f"{record.median('steps_recomputed'):11.0f}  {record.median('steps_missing'):7.0f}  {weights}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(sys.argv[1:])
    main(
        arguments.rounds, arguments.plans, arguments.steps, arguments.width, as_json=arguments.json
    )
