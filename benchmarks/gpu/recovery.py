"""A rank on a GPU is killed: seconds to the next applied step, steps computed again, and the final weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import command
from benchmarks.gpu.speed import settings_of
from paceline.strategies.plan import Plan

PLANS = ("single", "data=2", "shard=2", "pipeline=2 microbatches=4", "tensor=2")
# The model's steps take some 10 ms on a GPU of 2023, and its state is 40 MB.
MODEL: Mapping[str, Any] = {"width": 256, "layers": 4, "sequence": 128, "batch": 32}
STEPS = 400

REPORTED = (
    "recomputed_updates",
    "samples_lost",
    "samples_repeated",
    "weights",
    "difference",
    "undisturbed_s",
    "disturbed_s",
)


def recovery(
    gpus: int,
    folder: Path,
    python: Sequence[str],
    out_of_time: Callable[[], bool],
    *,
    plans: Sequence[str] = PLANS,
    model: Mapping[str, Any] = MODEL,
    steps: int = STEPS,
    jobs: int = 1,
) -> Iterator[dict[str, Any]]:
    """A row a plan, so many at a time: what `paceline rehearse --kill` says. Kernels repeat (deterministic=yes). The
    kill comes after three quarters of the steps, and the first checkpoint later."""

    def row_of(plan: str) -> dict[str, Any]:
        devices = command.devices(plan, gpus)
        row: dict[str, Any] = {"plan": plan, "devices": devices}
        if out_of_time():
            return {**row, "verdict": "not run", "reason": "the time was up"}
        last = Plan.parse(plan).world_size - 1
        ended = command.run(
            [
                *python,
                *command.PACELINE,
                "rehearse",
                f"{Path(__file__).with_name('jobs.py')}:gpt",
                "--plan",
                f"{plan} deterministic=yes",
                "--devices",
                devices,
                "--steps",
                str(steps),
                "--save-every",
                str(7 * steps // 8),
                "--kill",
                f"{last}@{3 * steps // 4}",
                "--json",
                "--run",
                str(folder / f"recovery-{plan.replace(' ', '-')}"),
                *settings_of(model),
            ]
        )
        if not ended.stdout.strip():
            return {
                **row,
                "verdict": "failed",
                "reason": ended.reason,
                "stderr_tail": ended.stderr_tail,
            }
        report = json.loads(ended.stdout)
        (effect,) = report["effects"]
        return {
            **row,
            "verdict": "as expected" if ended.exit_code == 0 else "differs",
            "reason": "",
            "stderr_tail": ended.stderr_tail,
            "next_step_s": effect["next_step_s"],
            "caught_up_s": effect["caught_up_s"],
            **{name: report[name] for name in REPORTED},
        }

    return command.beside(jobs, row_of, plans)
